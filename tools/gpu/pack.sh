#!/bin/bash
# Fill .gpu/ (48 MB) with the packages that a bare GPU machine with Python 3.12, torch and Triton lacks; takes two minutes.
# Run in the root of a checkout; the checks are run by tools/gpu/check.sh.
set -e
rm -rf .gpu && mkdir -p .gpu/wheels .gpu/numpy
download() { python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
  --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_17_x86_64 \
  --platform manylinux2014_x86_64 --platform manylinux1_x86_64 -d "$@"; }
download .gpu/wheels polars==2.1.0 pydantic==2.14.4 pydantic-core==2.50.5 annotated-types==0.8.0 typing-inspection==0.4.5 \
  typing-extensions==4.16.0 argcomplete==3.7.2 fsspec==2026.9.0
# Used only if the machine's Numba refuses its NumPy: NumPy 2.5 needs Numba 0.67.
download .gpu/numpy numpy==2.4.6
# xz makes the runtime of Polars 27 MB instead of the 45 MB of its wheel.
temporary=$(mktemp -d) && download "$temporary" polars-runtime-32==2.1.0
(cd "$temporary" && python3 -m zipfile -e polars_runtime_32-*.whl x && tar cf - -C x . | xz -6 > "$OLDPWD"/.gpu/polars_runtime.tar.xz)
rm -rf "$temporary" && du -cb .gpu/*/* .gpu/*.xz | tail -1
