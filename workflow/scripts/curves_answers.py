"""Let the model answer one context's questions itself, greedily, with the full cache."""

from pathlib import Path

from head_influence.console import run
from head_influence.curve_console import context_parser, opened


def main(a):
    from head_influence.answers import greedy_answers
    from head_influence.checkpoint import Checkpoint
    from head_influence.json_files import write_json
    from head_influence.texts import load_tokenizer

    found = greedy_answers(Checkpoint(a.checkpoint), opened(a), a.most)
    tokenizer = load_tokenizer(a.checkpoint)
    write_json(a.output, {name: {"ids": ids, "text": tokenizer.decode(ids)} for name, ids in found.items()})


if __name__ == "__main__":
    p = context_parser(__doc__)
    p.add_argument("--most", type=int, required=True, help="largest number of tokens")
    p.add_argument("output", type=Path)
    run(main, p.parse_args())
