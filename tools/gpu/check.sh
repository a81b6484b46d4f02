#!/bin/bash
# Check StrataRec on a machine with a GPU, in at most LIMIT seconds; the most valuable phases come first.
#   bash tools/gpu/check.sh [PHASE ...]   of: doctor demo pytest slots train graph costs cached hot dedup embedding cores anatomy directory moves rows memcheck racecheck (default: all)
# Each phase has a time limit and a result file in $OUT (default: build/gpu), so that a phase that fails costs only itself.
cd "$(dirname "$(readlink -f "$0")")/../.." && TOOLS=$PWD/tools/gpu && export OUT=${OUT:-$PWD/build/gpu} && mkdir -p "$OUT"
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export PYTHONPATH=$PWD/src:$PWD/tests:$TOOLS:$PWD LIMIT=${LIMIT:-580}
say() { printf '%4d s  %s\n' $SECONDS "$*" | tee -a "$OUT/summary.txt"; }
phase() { # name, seconds at most, log, command
  local name=$1 most=$2 log=$OUT/$3 began=$SECONDS left=$((LIMIT - SECONDS)); shift 3
  ((left < 20)) && { say "$name: no time left"; return; }
  ((most > left - 8)) && most=$((left - 8))
  SECONDS_LEFT=$((most - 10)) timeout -k 5 $most "$@" >> "$log" 2>&1
  say "$name: exit $? after $((SECONDS - began)) s"
}
phases=" ${*:-doctor demo pytest slots train graph costs cached hot dedup embedding cores anatomy directory moves rows memcheck racecheck} "
wanted() { [[ $phases == *" $1 "* ]]; }
if [ -d .gpu/wheels ]; then # packed by pack.sh: install it next to the machine's own packages
  export PYTHONPATH=/tmp/site:$PYTHONPATH XDG_CACHE_HOME=/tmp/cache NUMBA_CACHE_DIR=/tmp/numba TRITON_CACHE_DIR=/tmp/triton
  if [ ! -d /tmp/site/stratarec-0.1.0.dist-info ]; then
    mkdir -p /tmp/site
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .gpu/wheels/*.whl
    python3 -c "import tarfile; tarfile.open('.gpu/polars_runtime.tar.xz').extractall('/tmp/site', filter='data')"
    python3 -c "import numba" 2>/dev/null || python3 -m pip install -q --no-index --no-deps --target /tmp/site .gpu/numpy/*.whl
    mkdir /tmp/site/stratarec-0.1.0.dist-info # the command line reads its version there
    printf 'Metadata-Version: 2.1\nName: stratarec\nVersion: 0.1.0\n' > /tmp/site/stratarec-0.1.0.dist-info/METADATA
  fi
fi
{ nvidia-smi; lscpu | head -20; free -g; df -h /tmp; python3 - <<'E2'
import importlib.metadata as metadata
for name in "torch triton numba llvmlite numpy polars pyarrow pydantic pydantic-core rich fsspec pytest pytest-xdist hypothesis".split():
    try: print(name, metadata.version(name))
    except Exception as error: print(name, "MISSING", error)
import numba, polars, pyarrow, pydantic, stratarec.cli.checks.gpu
print("imports work")
E2
} > "$OUT/env.log" 2>&1
say "environment: $(tail -1 "$OUT/env.log")"
# Correctness: in parallel, as kernels of the CPU compile for a minute or two.
export OMP_NUM_THREADS=4
(wanted doctor && phase doctor 220 doctor.log python3 -m stratarec doctor --gpu cuda
  wanted demo && phase demo 160 demo.log bash "$TOOLS/demo.sh") &
wanted pytest && phase pytest 300 pytest.log python3 -m pytest tests/training/test_gpu.py tests/embedding/test_device_slots.py -m gpu \
  -o addopts=--import-mode=importlib -W ignore -p no:cacheprovider -n 8 -q --tb=short -rA --maxfail=60 &
wanted slots && phase slots 240 slots.log python3 "$TOOLS/slots.py" &
wait
unset OMP_NUM_THREADS
# Speed: nothing else runs. In the order in which the phases are named.
for name in $phases; do
  case $name in
    embedding) phase embedding 100 rest.log python3 "$TOOLS/kernels.py" "$OUT/bench.jsonl" ;;
    cores) phase cores 60 rest.log python3 -m benchmarks run cores --quick --parts train --out "$OUT/cores.json" ;;
    costs) phase costs 30 rest.log python3 "$TOOLS/costs.py" "$OUT/bench.jsonl" ;;
    anatomy | directory | moves) phase $name 50 rest.log python3 "$TOOLS/parts.py" "$OUT/bench.jsonl" $name ;;
    rows) phase rows 90 rest.log python3 "$TOOLS/kernels.py" "$OUT/bench.jsonl" tiles ;;
    train | cached) phase $name 100 rest.log python3 "$TOOLS/steps.py" "$OUT/bench.jsonl" $name ;;
    graph | hot | dedup) phase $name 50 rest.log python3 "$TOOLS/steps.py" "$OUT/bench.jsonl" $name ;;
  esac
done
for tool in memcheck racecheck; do
  wanted $tool && SMALL=1 PYTORCH_NO_CUDA_MEMORY_CACHING=1 phase $tool 60 rest.log \
    compute-sanitizer --tool $tool python3 "$TOOLS/kernels.py"
done
for log in doctor slots demo; do [ -f "$OUT/$log.log" ] && echo "== $log" && tail -n 15 "$OUT/$log.log"; done
[ -f "$OUT/pytest.log" ] && grep -aE "^(FAILED|ERROR)|passed|failed" "$OUT/pytest.log" | tail -25
[ -f "$OUT/bench.jsonl" ] && cut -c1-230 "$OUT/bench.jsonl"
cat "$OUT/summary.txt"
