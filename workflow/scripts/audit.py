"""Audit a finished study: all its files, and a sample of its numbers recomputed through the whole model."""

from functools import partial
from pathlib import Path

from head_influence.console import parser, progress, run


def main(a):
    from head_influence.audit import Expected, audit
    from head_influence.json_files import write_json
    from head_influence.texts import load_tokenizer, read_texts, tokenise

    tokenizer = load_tokenizer(a.checkpoint)
    texts = [(text, *tokenise(tokenizer, text)) for text in read_texts(a.texts, a.tokens)]
    expected = Expected(
        study=a.study,
        fingerprint=a.fingerprint,
        results=a.output.parent,
        checkpoint=a.checkpoint,
        texts=texts,
        codes=dict(code.split("=", 1) for code in a.codes),
        random_seed=a.random_seed,
        small_total={"vectors": a.small_total_vectors, "js": a.small_total_js},
        whole_forward=a.whole_forward,
    )
    write_json(a.output, audit(expected, a.trace, a.singles, a.joints, a.seed, partial(progress, a.log)))


if __name__ == "__main__":
    p = parser(__doc__)
    p.add_argument("--study", required=True)
    p.add_argument("--checkpoint", type=Path, required=True)
    p.add_argument("--fingerprint", required=True)
    p.add_argument("--texts", type=Path, required=True)
    p.add_argument("--tokens", type=int, required=True, help="window of a text that names none of its own")
    p.add_argument("--trace", type=Path, required=True, help="folder with the trace of the first text")
    p.add_argument("--codes", nargs="+", required=True, metavar="STAGE=VERSION")
    p.add_argument("--random-seed", type=int, required=True)
    p.add_argument("--small-total-vectors", type=float, required=True)
    p.add_argument("--small-total-js", type=float, required=True)
    p.add_argument("--whole-forward", action="store_true", help="hold the whole model in memory")
    p.add_argument("--singles", type=int, required=True)
    p.add_argument("--joints", type=int, required=True)
    p.add_argument("--seed", type=int, required=True)
    p.add_argument("output", type=Path)
    run(main, p.parse_args())
