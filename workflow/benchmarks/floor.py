"""What a study's matrix products alone need here, counted from shapes and stored masks by code of its own."""

import time
from multiprocessing import get_context
from pathlib import Path

import netCDF4
import numpy as np
from head_influence.checkpoint import Checkpoint
from head_influence.families import layer_of

ROWS, SECONDS = 1024, 3.0  # of the measured product, and how long it is repeated


class Layer:
    """Sizes of one decoder layer; products are counted in floating-point operations, two for each weight and row."""

    def __init__(self, checkpoint, index):
        layer = layer_of(checkpoint, index)
        self.softmax, self.heads = layer.kind == "softmax", layer.heads
        self.size, self.hidden = layer.key_dim, layer.hidden
        shapes = {name: shape for name, shape in layer.expected_shapes().items() if len(shape) == 2}
        self.inner = shapes["mlp.up_proj.weight"][0]
        self.distinct = {"q": layer.heads if self.softmax else layer.key_heads, "k": layer.key_heads}
        self.distinct["v"] = layer.key_heads if self.softmax else layer.heads
        self.dims = {"q": layer.key_dim, "k": layer.key_dim, "v": layer.value_dim}
        self.contributions = 2 * layer.hidden * layer.heads * layer.value_dim
        self.whole = 2 * sum(rows * columns for rows, columns in shapes.values())
        self.finish = 2 * 3 * self.hidden * self.inner
        self.projections = 2 * self.hidden * sum(self.distinct[c] * self.dims[c] for c in "qkv")

    @property
    def weights(self):
        """Numbers of weights that a job reads: of the contributions, of the feed-forward block, of Q, K and V."""
        return self.contributions // 2, self.finish // 2, self.projections // 2


def masks_once(removed):
    """Count the different (token, set) pairs of a joint file, by token and distinct user.

    Parameters
    ----------
    removed : array of bool (4, H, T, R)

    Returns
    -------
    callable
        From a list of recipient heads to the number of different pairs that they need, "none" included.
    """
    packed = np.packbits(removed, axis=1)
    scenarios, _, tokens, _ = removed.shape
    nothing = bytes(packed.shape[1])

    def count(heads):
        return sum(
            len({packed[s, :, t, r].tobytes() for s in range(scenarios) for r in heads} | {nothing})
            for t in range(tokens)
        )

    return count


def products(folder, checkpoint):
    """Floating-point operations of the products that a study needs, by stage, and the weights that its jobs read.

    Every different (token, set) once through the feed-forward block; of a joint run only the scored head's projections,
    and those of a key head that several query heads share once; the rows that controls need (baseline, null mask) too.
    """
    opened = Checkpoint(checkpoint)
    layers = [Layer(opened, index) for index in range(opened.text_config["num_hidden_layers"])]
    flops = dict.fromkeys(("trace", "baseline", "single", "joint"), 0)
    read = 0
    for path in sorted(Path(folder).glob("results/benchmark/joint/*/L*.nc")):
        with netCDF4.Dataset(path) as data:
            data.set_auto_mask(False)
            removed, index = np.asarray(data["removed"][:]).astype(bool), int(data.source_layer)
        source, recipient = layers[index], layers[index + 1]
        _, heads, tokens, recipients = removed.shape
        row = source.finish + recipient.projections
        rows = tokens * (heads + 2)  # each head, the baseline, the null mask
        once = masks_once(removed)
        everyone = range(recipients)
        attention = 2 * tokens**2 * recipient.size if recipient.softmax else 0
        flops["baseline"] += tokens * (source.contributions + row) + recipients * attention
        flops["single"] += rows * row + (heads + 2) * recipients * attention
        flops["joint"] += once(everyone) * source.finish + 5 * recipients * attention
        for c, distinct in recipient.distinct.items():
            each = recipients // distinct
            pairs = sum(once(range(d * each, (d + 1) * each)) for d in range(distinct))
            flops["joint"] += pairs * 2 * recipient.hidden * recipient.dims[c]
        outer, block, qkv = source.weights[0], source.weights[1], recipient.weights[2]
        read += outer + 3 * (block + qkv)
        if index == 0:
            flops["trace"] += tokens * sum(layer.whole for layer in layers)
            read += sum(layer.whole for layer in layers) // 2
    return flops, read


def forwards(folder):
    """Mean number of forward passes of one transition: nothing, each head, each recipient head's three sets, all."""
    counts = []
    for path in Path(folder).glob("results/benchmark/joint/*/L*.nc"):
        with netCDF4.Dataset(path) as data:
            _, heads, _, recipients = data["removed"].shape
        counts.append(2 + heads + 3 * recipients)
    return float(np.mean(counts))


def repeat(what, seconds):
    """Call `what` again and again for a while; return calls per second and per CPU second."""
    what()
    start, used, calls = time.perf_counter(), time.process_time(), 0
    while (passed := time.perf_counter() - start) < seconds:
        what()
        calls += 1
    return np.array([calls / passed, calls / (time.process_time() - used)])


def one_core(folder, barrier):
    """Measure one process: operations of its products, and weights read and converted, per second and CPU second."""
    opened = Checkpoint(folder)
    layer = Layer(opened, 0)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((ROWS, layer.hidden), np.float32)
    weight = rng.standard_normal((layer.inner, layer.hidden), np.float32)
    barrier.wait()
    rate = 2 * x.size * layer.inner * repeat(lambda: x @ weight.T, SECONDS)
    barrier.wait()
    names = [f"layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
    reading = layer.finish // 2 * repeat(lambda: [opened.tensor(name) for name in names], SECONDS)
    return rate, reading


def machine(folder, cores):
    """Measure `cores` processes of one thread at once.

    Returns
    -------
    array (2, 2)
        Operations, and weights that are read and converted: per second of all together, and per CPU second.
    """
    context = get_context("spawn")
    with context.Manager() as manager, context.Pool(cores) as pool:
        barrier = manager.Barrier(cores)
        found = pool.starmap(one_core, [(str(folder), barrier)] * cores)
    return np.sum(found, axis=0) / [1, cores]


def seconds(flops, read, rates):
    """Seconds, and CPU seconds, that the products and the reading take at the measured rates."""
    return sum(flops.values()) / rates[0] + read / rates[1]
