"""Problems, devices, and the choice of a kernel. Only folders in here, the families, know what a tile is."""
