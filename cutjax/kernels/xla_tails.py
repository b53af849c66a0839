"""The tails of products that cuBLAS and cuDNN compute for XLA, which then makes no pass over the result."""

from __future__ import annotations

from cutjax.epilogue.expression import Epilogue


def library_has(epilogue: Epilogue, convolution: str = "") -> bool:
    """True if XLA has an epilogue computed in the product, and needs no pass.

    That is a bias of columns and a matrix that are added, and relu of the sum: by cuBLAS without the matrix. The matrix
    may be in place or not: of 34 recorded ones that something else read, none took XLA a pass. Of the products of a
    convolution cuDNN has the forward one alone. By cuBLAS it is also a constant factor, as attention's scores have.

    Args:
      epilogue: of one product.
      convolution: which of a convolution's products it is, "" for one of matrices.
    """
    ops = [node.op for node in epilogue.nodes if node.op not in ("acc", "operand", "const", "convert_element_type")]
    matrices = [spec for spec in epilogue.operands if spec.row]
    biases = [spec for spec in epilogue.operands if not spec.row]
    if max(len(matrices), len(biases), len(epilogue.outputs)) > 1 or any(out.reduce for out in epilogue.outputs):
        return False
    if not all(spec.col for spec in epilogue.operands) or convolution not in ("", "forward"):
        return False
    if ops == ["mul"] and not epilogue.operands:
        return not convolution and any(node.op == "const" for node in epilogue.nodes)
    adds = ["add"] * len(epilogue.operands)
    return bool(ops) and ops in (adds, [*adds, "max"] if convolution or not matrices else adds)
