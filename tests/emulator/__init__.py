"""The emulator: kernels run on the CPU, from their PTX (docs/emulator.md)."""
