"""Checkpoints and studies to measure, and what running the workflow on them costs."""

import csv
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from head_influence.rehearsal import write_rehearsal
from tokenizers import Tokenizer, models, pre_tokenizers

REPOSITORY = Path(__file__).resolve().parents[2]
PUBLISHED = REPOSITORY / "resources/models/qwen3.5-2b/config.json"
TINY = {
    "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
SENTENCE = "Text {}: a window of bytes that stand for tokens, as long as it is asked to be. "
KINDS = ("trace", "baseline", "single", "joint", "concentration")


@dataclass
class Run:
    """What one run of the workflow took.

    Attributes
    ----------
    seconds : float
        Of the whole command.
    cpu, scheduler_cpu : float
        CPU seconds of all its processes, and of Snakemake's own among them.
    scheduler_mb : float
        Largest resident memory of Snakemake's own process.
    jobs : dict
        Kind to list of (seconds, CPU seconds, MB) as the jobs measured themselves.
    """

    seconds: float
    cpu: float
    scheduler_cpu: float
    scheduler_mb: float
    jobs: dict = field(default_factory=dict)

    @property
    def count(self):
        """Number of jobs."""
        return sum(map(len, self.jobs.values()))


def checkpoint(folder, layers=None, **changes):
    """Write a random checkpoint of Qwen3.5's layout with a byte-level tokenizer, once.

    Parameters
    ----------
    folder : Path
    layers : list of str, optional
        The layers' types; the published 24 otherwise.
    changes : dict
        Of the text model's configuration.
    """
    if (folder / "config.json").exists():
        return folder
    config = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    text = config["text_config"]
    text |= changes
    if layers:
        text |= {"layer_types": layers, "num_hidden_layers": len(layers), "vocab_size": 256}
        config["vision_config"] |= {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "out_hidden_size": 16}
    plan = folder.with_name(f"{folder.name}-plan")
    plan.mkdir(parents=True, exist_ok=True)
    (plan / "config.json").write_text(json.dumps(config), encoding="utf-8")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(plan / "tokenizer.json"))
    write_rehearsal(plan / "config.json", plan, folder, say=lambda line: None)
    shutil.rmtree(plan)
    return folder


def layer_types(count):
    """Three linear layers and a softmax one, in turn."""
    return ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(count)]


def prepare(folder, model, texts, tokens):
    """Write the settings of a study without controls into a new `folder`; `texts` is their number or a file."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if isinstance(texts, int):
        length = -(-tokens // len(SENTENCE))
        entries = [{"id": f"t{i:03d}", "language": "en", "text": SENTENCE.format(i) * length * 2} for i in range(texts)]
        texts = folder / "texts.json"
        texts.write_text(json.dumps(entries), encoding="utf-8")
    settings = yaml.safe_load((REPOSITORY / "config.yaml").read_text(encoding="utf-8"))
    settings |= {
        "study": "benchmark",
        "model": {"checkpoint": str(model), "revision": None},
        "texts": {"file": str(texts), "tokens": tokens},
        "controls": settings["controls"]
        | {"whole_forward": False, "random_weights": [], "permuted_weights": [], "mean_replacement": False},
        "curves": None,
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    return folder


def snakemake(folder, *options, **environment):
    """Run the workflow in `folder` and return its `Run`."""
    command = [sys.executable, "-m", "snakemake", "-s", str(REPOSITORY / "Snakefile"), "--quiet", "all", *options]
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    own, memory = 0.0, 0.0
    with (folder / "output.txt").open("w") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=os.environ | environment, stdout=output, stderr=subprocess.STDOUT
        )
        while process.poll() is None:
            own, memory = own_use(process.pid) or (own, memory)
            time.sleep(0.05)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed in {folder}:\n{(folder / 'output.txt').read_text()[-2000:]}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Run(seconds, cpu, own, memory, jobs(folder))


def own_use(process):
    """CPU seconds of a process without its children, and its largest memory in MB; None when it has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK"), int(lines["VmHWM"].split()[0]) / 1024
    except (OSError, KeyError, IndexError):
        return None


def jobs(folder):
    """Return what the jobs wrote about themselves beside their logs: kind to list of (seconds, CPU seconds, MB)."""
    found = {kind: [] for kind in KINDS}
    for path in sorted((folder / "logs").rglob("*.tsv")):
        names = [kind for kind in KINDS if kind in (path.parent.parent.name, path.stem.partition("-")[0])]
        with path.open(newline="") as file:
            row = next(csv.DictReader(file, delimiter="\t"))
        for kind in names[:1]:
            found[kind].append(tuple(float(row[key]) for key in ("s", "cpu_time", "max_rss")))
    return found
