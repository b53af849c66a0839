#!/bin/sh
# Runs the tests of products in JAX and Flax, of the installed versions, with cutjax's drop-ins: see
# docs/upstream-tests.md. Those of Flax also run with the layers of cutjax.flax. Sources are cloned into a folder, or
# taken from it where they are there already.
#
#   tests/upstream/run.sh [folder]
set -eu

here=$(cd "$(dirname "$0")" && pwd)
folder=${1:-$(mktemp -d)}
python=${PYTHON:-python}
mkdir -p "$folder"

clone() { # name, repository, prefix of its tags, its version where it is not the installed one
    version=${4-$("$python" -c "import $1; print('.'.join($1.__version__.split('.')[:3]))")}
    if [ ! -d "$folder/$1" ]; then
        git -c advice.detachedHead=false clone --quiet --depth 1 --branch "$3$version" "$2" "$folder/$1"
    fi
    echo "$1 $version in $folder/$1"
}

run() { # folder, arguments of pytest
    cd "$1"
    shift
    status=0
    JAX_PLATFORMS=cpu PYTHONPATH="$here:$here/../..${PYTHONPATH:+:$PYTHONPATH}" \
        "$python" -m pytest -q -p "$plugin" -p no:cacheprovider "$@" || status=1
    failed=$((failed + status))
}

failed=0
plugin=substitute
clone jax https://github.com/jax-ml/jax jax-v
clone flax https://github.com/google/flax v
# Left out: tests that look for the equation dot_general in a jaxpr.
run "$folder/jax" -W ignore tests/lax_test.py tests/lax_numpy_test.py tests/lax_numpy_einsum_test.py \
    tests/lax_vmap_test.py tests/lax_autodiff_test.py \
    -k "(einsum or dot or matmul) and not mixed_precision and not MixedPrecisionDot and not test_preferred_element_type"
run "$folder/jax" -W ignore tests/lax_test.py tests/lax_vmap_test.py tests/lax_autodiff_test.py \
    -k "(Conv and not Convert and not Patches and not Local) or conv_general"
run "$folder/flax" tests/linen/linen_linear_test.py tests/linen/linen_attention_test.py \
    tests/nnx/nn/linear_test.py tests/nnx/nn/attention_test.py tests/nnx/nn/conv_test.py
# Flax's layers in float8, of which each product is one of float8 with scales.
run "$folder/flax" tests/linen/linen_test.py -k "Fp8"
# The layers of cutjax.flax in place of Flax's own. Left out: a test of what a layer prints, which has one attribute more.
plugin=flax_layers
run "$folder/flax" tests/linen/linen_linear_test.py tests/linen/linen_attention_test.py \
    tests/linen/linen_recurrent_test.py tests/linen/linen_transforms_test.py tests/linen/partitioning_test.py \
    tests/linen/linen_module_test.py tests/nnx/nn/linear_test.py tests/nnx/nn/conv_test.py tests/nnx/nn/attention_test.py \
    tests/nnx/nn/lora_test.py tests/nnx/nn/recurrent_test.py -k "not test_module_trace and not cloudpickle"
# Products of operands with scales. Left out: tests that quantize alone, that look for an equation, for collectives, or for
# which of its two ways Qwix takes; that time large products; and those of Qwix whose bounds of the quantization error are
# for other random numbers than this version of JAX makes.
plugin=quantized
run "$folder/jax" -W ignore tests/scaled_dot_test.py tests/nn_test.py tests/scaled_matmul_stablehlo_test.py \
    -k "(ScaledDotTest or Scaled) and not remat and not collectives and not sharded and not working_example \
and not test_quantize"
clone qwix https://github.com/google/qwix "" 0.1.8
export PYTHONPATH="$folder/qwix${PYTHONPATH:+:$PYTHONPATH}"
run "$folder/qwix" tests/_src/core/dot_general*.py tests/_src/core/einsum*.py tests/_src/core/ragged_dot*.py \
    tests/_src/core/conv_general*.py tests/_src/core/two_dim_scales_test.py tests/_src/core/mxfp_dot_test.py \
    tests/_src/core/qarray_test.py \
    -k "not benchmark and not outer_product and not implementation and not verify_jaxpr and not fq_int8_nhwc \
and not fq_fp8_bwd_nhwc and not fq_int4 and not fq_int8_fwd and not (ConvGeneralTest and numerics) \
and not (test_einsum_lhs_asymmetric and not subchannel)"
exit "$failed"
