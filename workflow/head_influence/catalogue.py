"""The figures of a study by name: where each is drawn, its category, and its title, the question that it answers."""

import hashlib
from pathlib import Path

CONCENTRATION, SIZE, IDENTITY = "Concentration", "Size", "Identity of heads"
JOINT, TEXTS, CONTRAST = "Joint removal", "Texts and positions", "Contrast"

# name -> (module, category, title)
FIGURES = {
    "distributions": ("concentration", CONCENTRATION, "How unequal is the influence of heads in each transition?"),
    "kinds": ("concentration", CONCENTRATION, "How unequal is influence, kind by kind, beside the controls?"),
    "components": ("concentration", CONCENTRATION, "Do queries, keys and values differ in how unequal influence is?"),
    "totals": ("concentration", SIZE, "How large is the influence in each transition?"),
    "dominance": ("identity", IDENTITY, "Does the same head dominate across tokens?"),
    "heatmap": ("identity", IDENTITY, "Which source heads carry the influence at each token?"),
    "stability": ("identity", IDENTITY, "How stable is the half of heads with the larger influence?"),
    "variance": ("identity", IDENTITY, "What do the shares of the heads depend on?"),
    "constant": ("identity", IDENTITY, "Do heads that dominate write the same vector at every token?"),
    "scenarios": ("joint", JOINT, "How much do the weak, a random and the strong half of heads do?"),
    "joint": ("joint", JOINT, "How large is a joint effect beside the sum of its single effects?"),
    "additivity": ("joint", JOINT, "How far is a joint change from the sum of the single changes?"),
    "positions": ("concentration", TEXTS, "Does concentration change along the text?"),
    "texts": ("concentration", TEXTS, "How much do the texts differ?"),
    "averages": ("concentration", CONTRAST, "What would averaging influences first have hidden?"),
}  # fmt: skip


def title(name):
    """Title of a figure."""
    return FIGURES[name][2]


def words_version():
    """Hash of the report's templates and captions, which are no code."""
    package = Path(__file__).parent
    paths = sorted([*(package / "templates").iterdir(), *(package.parent / "report").glob("*.rst")])
    return hashlib.sha256(b"".join(path.name.encode() + path.read_bytes() for path in paths)).hexdigest()[:16]
