"""Which files make up a checkpoint folder; each is untrusted input. Neither numpy nor a model is needed."""

from pathlib import Path

from head_influence import StudyError
from head_influence.json_files import read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CONFIG = "config.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def indexed_tensors(index, content):
    """Check the `content` of an index file; return tensor name to the name of its shard in the same folder."""
    found = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(found, dict) or not found:
        raise StudyError(f"{index}: weight_map: expected an object of tensor name to file name")
    for name in set(map(str, found.values())):
        if Path(name).name != name or "\\" in name or not name.endswith(".safetensors"):
            raise StudyError(f"{index}: {name!r} is not the name of a safetensors file in the same folder")
    return {tensor: str(name) for tensor, name in found.items()}


def weight_files(folder):
    """Find the weights of a checkpoint.

    Parameters
    ----------
    folder : path

    Returns
    -------
    paths : list of Path
        `model.safetensors`, or the shards that the index names.
    where : dict or None
        Tensor name to file name as the index has it; None where there is no index.

    Raises
    ------
    StudyError
        If there are none, if a shard is missing or outside the folder, or if the weights are pickles.
    """
    folder = Path(folder)
    if (folder / SINGLE).exists():
        return [folder / SINGLE], None
    index = folder / INDEX
    if index.exists():
        where = indexed_tensors(index, read_json(index))
        names = sorted(set(where.values()))
        for name in names:
            if not (folder / name).exists():
                raise StudyError(f"{index}: shard {name} is missing from the folder")
        return [folder / name for name in names], where
    pickles = sorted(path.name for ending in PICKLES for path in folder.glob(ending))
    if pickles:
        raise StudyError(
            f"{folder}: only pickle weights found ({', '.join(pickles[:3])}), which can run code when read; "
            f"expected {SINGLE}, or {INDEX} and its shards"
        )
    raise StudyError(f"{folder}: no weights: expected {SINGLE}, or {INDEX} and its shards")


def checkpoint_files(folder):
    """Return the files that say what a checkpoint is: configuration, tokenizer (as far as it is there), weights."""
    folder = Path(folder)
    tokenizer = [folder / name for name in TOKENIZER_FILES if (folder / name).exists()]
    return [folder / CONFIG, *tokenizer, *weight_files(folder)[0]]
