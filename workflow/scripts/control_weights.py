"""Write a checkpoint of the same architecture with random or permuted weights."""

from pathlib import Path

from head_influence.console import parser, run


def main(a):
    from head_influence.checkpoint import Checkpoint
    from head_influence.control_weights import write_permuted, write_random

    write = {"random": write_random, "permuted": write_permuted}[a.control]
    write(Checkpoint(a.checkpoint), a.seed, a.output.parent)


if __name__ == "__main__":
    p = parser(__doc__)
    p.add_argument("--checkpoint", required=True)
    p.add_argument("--control", choices=["random", "permuted"], required=True)
    p.add_argument("--seed", type=int, required=True)
    p.add_argument("output", type=Path, help="the checkpoint's model.safetensors")
    run(main, p.parse_args())
