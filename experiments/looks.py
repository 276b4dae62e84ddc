"""One look for each system, in all figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autohete.report.style import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, YELLOW

# Paul Tol, "Colour schemes" (2021), muted.
WINE, TEAL, OLIVE, INDIGO, SAND, FOREST, ROSE = "#882255", "#44AA99", "#999933", "#332288", "#DDCC77", "#117733", "#CC6677"


@dataclass(frozen=True, slots=True)
class SystemLook:
    """Label and colour of a system, its marker and line style where it is a line, and its hatch where it is a bar.

    Versions of a system have its colour.
    """

    label: str
    colour: str
    marker: str
    line: Literal["-", "--", "-.", ":"] = "-"
    hatch: str = ""

    @property
    def ink(self) -> str:
        """The colour for lines and edges on white, where yellow is hard to see."""
        return "#B8A800" if self.colour == YELLOW else self.colour


#: By the beginning of a policy's text; the longest that fits counts.
LOOKS = {
    "resident": SystemLook("all on the GPU", GREY, "X"),
    "resident:zero_stage": SystemLook("ZeRO stage 3, all on the GPUs", GREY, "X"),
    "resident:checkpointing=none": SystemLook("nothing recomputed", GREY, "X"),
    "resident:checkpointing=selective": SystemLook("selective", GREY, "P"),
    "resident:checkpointing=full": SystemLook("every block", GREY, "o"),
    "sqrt_checkpoint": SystemLook("segments", TEAL, "8"),
    "sqrt_checkpoint:keep_last": SystemLook("segments, the last kept", TEAL, "H"),
    "rotor": SystemLook("Rotor", WINE, ".", hatch="||||"),
    "checkmate": SystemLook("Checkmate", WINE, "+", "--"),
    "moccasin": SystemLook("Moccasin", TEAL, "x", "--"),
    "pofo": SystemLook("POFO", WINE, "x", "-."),
    "dtr": SystemLook("DTR", ROSE, "*", "-."),
    "capuchin": SystemLook("Capuchin", ROSE, "p", "--"),
    "offload_activations": SystemLook("vDNN", SAND, ">", ":"),
    "pipeline": SystemLook("pipeline", GREY, "|", "-."),
    "flashneuron": SystemLook("FlashNeuron", SAND, "s", "-."),
    "pipeline_offload": SystemLook("pipeline with offload", GREY, "_", ":"),
    "mpress": SystemLook("MPress", GREY, ".", "--"),
    "harmony": SystemLook("Harmony", TEAL, "+", ":"),
    "mobius": SystemLook("Mobius", TEAL, ">", "-."),
    "roundpipe": SystemLook("RoundPipe", TEAL, "1", "-."),
    "superneurons": SystemLook("SuperNeurons", SAND, "d", ":"),
    "autotm": SystemLook("AutoTM", SAND, "o", "--"),
    "te_offload": SystemLook("Transformer Engine", SAND, "<", "--"),
    "zero_offload": SystemLook("ZeRO-Offload", PURPLE, "s", hatch="/////"),
    "zero_offload:deepspeed=0.4.3": SystemLook("ZeRO-Offload, DeepSpeed 0.4.3", PURPLE, "s", hatch="....."),
    "zero_offload:deepspeed=0.8.3": SystemLook("ZeRO-Offload, DeepSpeed 0.8.3", PURPLE, "s"),
    "zero_offload:deepspeed=2026": SystemLook("ZeRO-Offload, DeepSpeed of 2026", PURPLE, "s", hatch="/////"),
    "patrickstar": SystemLook("PatrickStar", ORANGE, "D", hatch="....."),
    "stronghold": SystemLook("StrongHold", SKY, "^", hatch="-----"),
    "l2l": SystemLook("L2L", OLIVE, "<", ":"),
    "block_swap": SystemLook("block swap", OLIVE, "v", "--"),
    "fsdp2_offload": SystemLook("FSDP2 offload", "black", "v", ":"),
    "zero3_offload": SystemLook("ZeRO-3 offload", "#8C564B", "<", "-."),
    "zero_infinity": SystemLook("ZeRO-Infinity", INDIGO, "8", "-."),
    "mlp_offload": SystemLook("MLP-Offload", FOREST, "H", ":"),
    "ratel": SystemLook("Ratel", ROSE, "D", "-."),
    "megatrain": SystemLook("MegaTrain", PURPLE, "2", ":"),
    "elixir": SystemLook("Elixir", ORANGE, "4", "-."),
    "slideformer": SystemLook("SlideFormer", SKY, "3", "-."),
    "megatron_hybrid": SystemLook("Megatron-LM, CPU offload", YELLOW, "X", ":"),
    "superoffload": SystemLook("SuperOffload", "#8C564B", "s", "--"),
    "zenflow": SystemLook("ZenFlow", PURPLE, "d", "-."),
    "smart_infinity": SystemLook("Smart-Infinity", INDIGO, "*", ":"),
    "twin_flow": SystemLook("Twin-Flow", YELLOW, "P", "--"),
    "deep_optimizer_states": SystemLook("Deep Optimizer States", GREEN, "*", "--", "\\\\\\"),
    "streamed_states": SystemLook("streamed states", "#7A5195", "h", "-."),
    "autohete": SystemLook("AutoHete", BLUE, "o"),
    "autohete:priority=off": SystemLook("AutoHete, no priority", BLUE, "o", hatch="xxxxx"),
    "dataflow": SystemLook("dataflow", FOREST, "P", "-."),
    "trainstream": SystemLook("TrainStream", TEAL, "h", ":"),
    "joint": SystemLook("joint", VERMILION, "d", "--"),
}


def look(policy: str) -> SystemLook:
    """Return the look of ``policy``."""
    return LOOKS[max((name for name in LOOKS if policy.startswith(name)), key=len)]
