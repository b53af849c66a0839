"""The ground below kernels: NVRTC, caches, files of tuned kernels, the launch plan, backends and settings."""
