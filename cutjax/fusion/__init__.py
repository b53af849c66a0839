"""``cutjax.fuse`` and ``cutjax.patch``: products of a program, with what is around them, as kernels where that pays."""
