"""A .gguf file as a checkpoint folder: dequantised once, by transformers, to float32 safetensors."""

import os
import shutil
import tempfile
from pathlib import Path

from head_influence import StudyError
from head_influence.fingerprint import file_sha256
from head_influence.hub import SOURCE, file_state, validate
from head_influence.json_files import size_of, write_json
from head_influence.layout import TOKENIZER_FILES, checkpoint_files

MAGIC = b"GGUF"


def convert(source, folder):
    """Write a .gguf file's model as a checkpoint folder, whole or not at all.

    The weights are stored in float32, in which the quantised values are exact: nothing is rounded a second time.

    Parameters
    ----------
    source : path
        The .gguf file.
    folder : path
        Where the checkpoint goes; an older one is replaced.

    Raises
    ------
    StudyError
        If the file is not one that transformers can read, or the model is not supported.
    """
    source, folder = Path(source), Path(folder)
    size_of(source)
    with source.open("rb") as file:
        if file.read(4) != MAGIC:
            raise StudyError(f"{source}: not a GGUF file")
    record = {"path": str(source), "state": file_state(source), "sha256": file_sha256(source)}
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _save(source, made)
        kept = {path.name for path in checkpoint_files(made)} | set(TOKENIZER_FILES)
        for extra in made.iterdir():
            if extra.name not in kept and not extra.name.endswith(".index.json"):
                extra.unlink()
        validate(made)
        write_json(made / SOURCE, record)
        made.chmod(0o755)
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)
    except OSError as error:
        raise StudyError(f"{folder}: cannot be written ({error.strerror})") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _save(source, folder):
    """Let transformers read the file and save model and tokenizer."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(source.parent.absolute()), "gguf_file": source.name}
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32, output_loading_info=True)
        tokenizer = AutoTokenizer.from_pretrained(**where)
    except Exception as error:  # of many types, for a file that anybody can have made
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise StudyError(f"{source}: transformers cannot read it: {reason}") from error
    if absent := sorted(loading["missing_keys"]):  # transformers has drawn these at random
        raise StudyError(f"{source}: it has no tensor for {absent[0]}")
    model.hf_quantizer = None  # the weights are plain numbers now
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder, max_shard_size="2GB")
    tokenizer.save_pretrained(folder)
