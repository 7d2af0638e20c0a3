"""A study as the workflow sees it: which texts, transitions and weights, and where each file goes."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from head_influence import StudyError
from head_influence.checkpoint import Checkpoint
from head_influence.claims import check_owner
from head_influence.families import check, family_of, layer_count, layer_of
from head_influence.fingerprint import fingerprint
from head_influence.provenance import code_version
from head_influence.settings import check_settings
from head_influence.texts import check_windows, load_tokenizer, plain_name, read_texts


@dataclass(frozen=True)
class Variant:
    """One run of the study's measurement: on the checkpoint itself or on a control's weights.

    Attributes
    ----------
    study : str
        Folder under results/.
    folder : str
        Where its checkpoint is, or will be.
    fingerprint : str
        Identity of its weights: part of every cache path.
    control : str
        "" (the study itself), "random", "permuted" or "mean".
    seed : int
        Of the control's weights.
    made : bool
        Whether a rule writes the checkpoint.
    """

    study: str
    folder: str
    fingerprint: str
    control: str = ""
    seed: int = 0
    made: bool = False


class Study:
    """A validated study.

    Parameters
    ----------
    settings : dict
        The merged settings.
    place : hub.Place
        Where the checkpoint is.

    Attributes
    ----------
    texts : list of Text
    tokens : dict
        Text id to the number of tokens that are used.
    layers : int
    kinds : list of str
        "linear" or "softmax", per layer.
    variants : dict
        Study name to `Variant`; the first is the study itself.

    Raises
    ------
    StudyError
        If anything about the settings, the texts or the checkpoint would stop the study later.
    """

    def __init__(self, settings, place):
        check_settings(settings)
        self.settings = settings
        self.name = plain_name(settings["study"], "settings: study")
        self.cache = Path(settings["cache_dir"])
        self.texts_file = settings["texts"]["file"]
        self.texts = read_texts(self.texts_file, settings["texts"]["tokens"])
        self.by_id = {text.id: text for text in self.texts}
        self.folder, self.revision = str(place.folder), place.revision() or ""
        checkpoint = Checkpoint(self.folder)
        family = family_of(checkpoint)
        self.family = family.__name__.rpartition(".")[2]
        self.layers = layer_count(checkpoint)
        if self.layers < 2:
            raise StudyError(f"{self.folder}: the model has one layer; a transition needs two")
        check(checkpoint)
        self.kinds = [layer_of(checkpoint, i).kind for i in range(self.layers)]
        first = settings["measure"]["first_query"]
        counts = check_windows(load_tokenizer(self.folder), self.texts, first, self.texts_file)
        self.tokens = {text.id: count for text, count in zip(self.texts, counts, strict=True)}
        self.fingerprint = fingerprint(self.folder, self.cache)
        check_owner(self.name, self.folder, self.fingerprint)
        self.variants = {variant.study: variant for variant in self._variants()}
        self.by_fingerprint = {v.fingerprint: v for v in self.variants.values() if v.control != "mean"}

    def _variants(self):
        controls = self.settings["controls"]
        yield Variant(self.name, self.folder, self.fingerprint[:16])
        code = code_version("control_weights")[:8]
        for control in ("random", "permuted"):
            for seed in controls[f"{control}_weights"]:
                mark = f"{self.fingerprint[:16]}-{control}{seed}-{code}"
                folder = str(self.cache / "checkpoints" / mark)
                yield Variant(f"{self.name}-{control}{seed}", folder, mark, control, seed, made=True)
        if controls["mean_replacement"]:
            yield Variant(f"{self.name}-mean", self.folder, self.fingerprint[:16], "mean")

    def made_from(self, codes):
        """Return what numbers depend on that no path shows: settings, texts, and `codes`, stage to version."""
        texts = [[text.id, self.window(text.id), text.language] for text in self.texts]
        return {"settings (measure)": self.settings["measure"], "texts": texts, "code": codes}

    def code(self, *modules):
        """Version of the code of a stage: `modules` and the checkpoint's family."""
        return code_version(*modules, f"families.{self.family}")

    def transitions(self):
        """Two-digit names of the source layers."""
        return [f"{layer:02d}" for layer in range(self.layers - 1)]

    def window(self, text):
        """Part of a cache path that says which text and how much of it."""
        return f"{self.by_id[text].sha256[:12]}-{self.tokens[text]}"

    @property
    def all_windows(self):
        """Part of a cache path that says which texts, in which order, a mean is over."""
        return hashlib.sha256(" ".join(self.window(text.id) for text in self.texts).encode()).hexdigest()[:12]

    def cached(self, variant, stage, code, text):
        """Where a cached stage of one text is, without what follows the text's id."""
        return str(self.cache / variant.fingerprint / self.window(text) / f"{stage}-{code[:8]}" / text)
