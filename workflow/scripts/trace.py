"""Trace one text: one netCDF file per layer."""

from pathlib import Path

from head_influence.console import parser, progress, run


def main(a):
    from head_influence import StudyError
    from head_influence.checkpoint import Checkpoint
    from head_influence.texts import load_tokenizer, read_texts, tokenise
    from head_influence.trace import trace, write_trace

    checkpoint = Checkpoint(a.checkpoint)
    text = next((t for t in read_texts(a.texts, a.tokens) if t.id == a.text), None)
    if text is None or text.sha256 != a.text_sha256:
        raise StudyError(f"{a.texts}: text {a.text!r} changed since the study was planned; run the same command again")
    ids, strings = tokenise(load_tokenizer(a.checkpoint), text)
    ids, strings = ids[: a.tokens], strings[: a.tokens]
    records, last = trace(checkpoint, ids, say=lambda line: progress(a.log, line))
    attributes = {
        "stage": "trace",
        "text": text.id,
        "language": text.language,
        "text_sha256": text.sha256,
        "tokens": len(ids),
        "model": a.model,
        "revision": a.revision,
        "fingerprint": a.fingerprint,
        "code": a.code,
    }
    write_trace(a.folder, records, last, ids, strings, attributes)


if __name__ == "__main__":
    p = parser(__doc__)
    p.add_argument("--checkpoint", required=True)
    p.add_argument("--texts", type=Path, required=True)
    p.add_argument("--text", required=True, help="id of the text")
    p.add_argument("--text-sha256", required=True)
    p.add_argument("--tokens", type=int, required=True)
    p.add_argument("--model", required=True, help="the model's name in the settings")
    p.add_argument("--revision", default="")
    p.add_argument("--fingerprint", required=True)
    p.add_argument("--code", required=True)
    p.add_argument("folder", type=Path, help="where the layers' files go")
    run(main, p.parse_args())
