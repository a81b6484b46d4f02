#!/bin/bash
# Train the demo's log, made smaller, on the CPU and on a GPU, and evaluate each run on the other device.
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
