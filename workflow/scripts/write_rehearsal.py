"""Write a checkpoint in the published layout and size of Qwen3.5-2B with seeded random weights."""

from pathlib import Path

from head_influence.console import parser, progress, run


def main(a):
    from head_influence.rehearsal import write_rehearsal

    write_rehearsal(a.config, a.tokenizer, a.output.parent, a.seed, say=lambda line: progress(a.log, line))


if __name__ == "__main__":
    p = parser(__doc__)
    p.add_argument("--config", type=Path, required=True, help="configuration in the published form")
    p.add_argument("--tokenizer", type=Path, required=True, help="folder whose tokenizer is copied")
    p.add_argument("--seed", type=int, required=True)
    p.add_argument("output", type=Path, help="config.json of the checkpoint")
    run(main, p.parse_args())
