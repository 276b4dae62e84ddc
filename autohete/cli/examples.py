"""Three examples of each command, which its help ends with."""

#: Command -> what follows its name.
EXAMPLES = {
    "simulate": (
        "--model qwen3-8b --hardware rtx4090-workstation --batch-size 1",
        "--workload gpt-10b --gpu-memory 24GiB --policy autohete --policy zero_offload:deepspeed=0.8.3",
        "--model meta-llama/Llama-3.1-8B --lora 16 --policy joint --gantt timeline.png --json",
    ),
    "plan": (
        "--model llama-3.1-8b --hardware rtx4090-workstation --host-memory 64GiB --batch-size 4 --html answer.html",
        "--model qwen3-0.6b --hardware gb10-dgx-spark --tokens 300M --json answer.json",
        "--workload gpt-10b --gpu-memory 24GiB --policy autohete --max batch",
    ),
    "largest": (
        "--family qwen3 --lora 16 --hardware rtx4090-workstation --tokens-per-second 100",
        "--family llama-3 --hardware h100-pcie5 --sequence-length 4096 --chunked-loss",
        "--family gpt2 --gpu-memory 8GiB --policy resident --json",
    ),
    "sweep": (
        "--workload gpt-2b --policy zero_offload --over links.h2d.bandwidth=10GB/s..30GB/s:10GB/s --out sweep.csv",
        "--model qwen3-0.6b --policy resident --policy joint --over batch-size=1,2,4 --out batch.csv --plot batch.png",
        "--workload gpt-2b --policy zero_offload --sensitivity --out effects.csv --plot effects.png",
    ),
    "compare": (
        "predicted.json measured.json",
        "predicted.json measured.json --gantt both.png",
        "answer.json other-answer.json --html both.html",
    ),
    "train": (
        "--steps 100 --gpu-memory 25% --trace measured.json --predicted-trace predicted.json",
        "--model my-model --data my-text --out my-tuned-model --save checkpoints --save-every 100",
        "--verify 3 --policy zero_offload",
    ),
    "profile": (
        "machine.json",
        "machine.json --gpu-memory 64MiB --quick",
        "machine.json --device cuda --drive /tmp --hidden 1024 --blocks 12",
    ),
    "calibrate": (
        "trace.json.gz --hardware h100-pcie5 --hardware-out my-node.toml",
        "trace.json --model qwen3-0.6b --batch-size 4 --policy zero_offload --profile-out measured.json",
        "report.sqlite --hardware rtx4090-workstation --step-name train_step --json",
    ),
    "trace": (
        "my_model.py:build table.json",
        "t5:num_layers=6 t5.json --sequence-length 256",
        "config.json model.json --precision fp32",
    ),
    "presets": (
        "models qwen3",
        "hardware 4090",
        "llama-3.1-8b",
    ),
    "hardware": (
        "show rtx4090-workstation",
        "new my-node.toml --base h100-pcie5",
        "check my-node.toml",
    ),
    "schema": (
        "plan",
        "profile",
        "trace",
    ),
}
