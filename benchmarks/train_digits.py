"""Train a small vision transformer twice, with torch's layer norm and with layernorm_ext's, and compare.

    python benchmarks/train_digits.py

takes about a minute on two CPU cores. scikit-learn contains the images, 1,797 handwritten digits of 8x8 pixels, so
nothing is downloaded. Both models start from the same parameters and train in turn on the same batches, so any
difference comes from the layer norm.

The script draws both loss curves into digits.png and fails if

* a model classifies less than 97 % of the test images correctly, or the accuracies differ by more than 1.5 points;
* the losses differ by more than 0.00001 at any step of the first epoch;
* the profiler sees a layer norm of torch in our model, or does not see ours for every layer.
"""

import argparse
import copy
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

import layernorm_ext

TEST_IMAGES = 360
MIN_ACCURACY = 0.97
# Two correct layer norms round differently, and every training step magnifies the difference. It is tiny in the first
# epoch; at the end, the models may classify a few images differently (1.5 points are 5 of 360).
MAX_ACCURACY_DIFFERENCE = 0.015
MAX_FIRST_EPOCH_DIFFERENCE = 1e-5

ATEN_OPS = ("aten::layer_norm", "aten::native_layer_norm", "aten::native_layer_norm_backward")
OUR_OPS = ("layernorm::forward", "layernorm::backward")


class Block(nn.Module):
    """Pre-norm transformer block: self-attention and a two-layer perceptron, each with a residual connection."""

    def __init__(self, width: int, heads: int, norm: type[nn.LayerNorm]) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = norm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = norm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def attend(self, x: Tensor) -> Tensor:
        """Mix the tokens of x, (batch, tokens, width), by multi-head self-attention."""
        # (batch, tokens, 3 * width) -> query, key and value: (batch, heads, tokens, width / heads) each
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same shape."""
        x = x + self.attend(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """Classifies (batch, 8, 8) images of digits, each cut into 16 patches of 2x2 pixels."""

    def __init__(self, norm: type[nn.LayerNorm], width: int = 64, depth: int = 4, heads: int = 4) -> None:
        super().__init__()
        # The first convolution detects edges; there are too few images to learn that with attention alone.
        self.embed = nn.Sequential(
            nn.Conv2d(1, 32, kernel_size=3, padding=1),
            nn.GELU(),
            nn.Conv2d(32, width, kernel_size=2, stride=2),
        )
        self.position = nn.Parameter(0.5 * torch.randn(16, width))
        self.blocks = nn.Sequential(*(Block(width, heads, norm) for _ in range(depth)))
        self.norm = norm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Map (batch, 8, 8) to (batch, 10)."""
        patches = self.embed(images.unsqueeze(1)).flatten(2).transpose(1, 2)  # (batch, 16, width)
        x = self.norm(self.blocks(patches + self.position))
        return self.head(x.mean(dim=1))


@dataclass
class Run:
    """A model in training, with the losses and durations of its steps."""

    name: str
    model: VisionTransformer
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def step(self, images: Tensor, labels: Tensor) -> None:
        """Take one training step; record its loss and its duration."""
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = loss_of(self.model, images, labels)
        loss.backward()
        self.optimizer.step()
        if images.is_cuda:
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss.item())
        self.schedule.step()

    @torch.no_grad()
    def accuracy(self, images: Tensor, labels: Tensor) -> float:
        """Return the fraction of images that the model labels correctly."""
        return (self.model(images).argmax(dim=1) == labels).double().mean().item()


def main() -> None:
    args = parse_args()
    train, test = load(args.device)
    images, labels = train
    steps_per_epoch = len(images) // args.batch_size
    steps = args.epochs * steps_per_epoch

    reference = new_run("torch.nn.LayerNorm", nn.LayerNorm, steps, args)
    ours = new_run("layernorm_ext.LayerNorm", layernorm_ext.LayerNorm, steps, args)
    ops = count_ops(ours.model, images[: args.batch_size], labels[: args.batch_size])

    for step in tqdm(range(steps), desc="training both", unit="step"):
        if step % steps_per_epoch == 0:
            order = torch.randperm(len(images)).to(args.device)
        start = step % steps_per_epoch * args.batch_size
        chosen = order[start : start + args.batch_size]
        batch = shift(images[chosen]), labels[chosen]
        # The order alternates, because the second model finds the batch and the allocator's memory in the caches.
        for run in (reference, ours) if step % 2 else (ours, reference):
            run.step(*batch)

    accuracies = reference.accuracy(*test), ours.accuracy(*test)
    plot((reference, ours), accuracies, steps_per_epoch, args.output)
    first_epoch = np.abs(np.subtract(ours.losses, reference.losses))[:steps_per_epoch].max()
    report((reference, ours), accuracies, first_epoch, ops)
    print(f"loss curves             {args.output}")

    failures = check(ours.model, accuracies, first_epoch, ops)
    if failures:
        sys.exit("FAILED: " + "\nFAILED: ".join(failures))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0, help="seed of the parameters and the batches")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--output", default="digits.png", help="where to draw the loss curves")
    return parser.parse_args()


def load(device: str) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return (images, labels) for training and for testing, with pixels between -1 and 1."""
    pixels, labels = load_digits(return_X_y=True)
    images = (pixels / 8 - 1).reshape(-1, 8, 8).astype(np.float32)
    split = train_test_split(images, labels, test_size=TEST_IMAGES, stratify=labels, random_state=0)
    train_images, test_images, train_labels, test_labels = (torch.from_numpy(a).to(device) for a in split)
    return (train_images, train_labels), (test_images, test_labels)


def new_run(name: str, norm: type[nn.LayerNorm], steps: int, args: argparse.Namespace) -> Run:
    """Build a model and its optimizer; the initial parameters do not depend on `norm`."""
    torch.manual_seed(args.seed)
    model = VisionTransformer(norm).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    return Run(name, model, optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps))


def shift(images: Tensor) -> Tensor:
    """Shift every image randomly by up to one pixel in each direction."""
    n, height, width = images.shape
    background = F.pad(images, (1, 1, 1, 1), value=-1)
    windows = background.unfold(1, height, 1).unfold(2, width, 1)  # (n, 3, 3, height, width)
    down, right = torch.randint(3, (2, n))
    return windows[torch.arange(n), down, right]


def loss_of(model: VisionTransformer, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(images), labels, label_smoothing=0.1)


def count_ops(model: VisionTransformer, images: Tensor, labels: Tensor) -> Counter[str]:
    """Count the operators that forward and backward run, on a copy of the model."""
    model = copy.deepcopy(model)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        loss_of(model, images, labels).backward()
    return Counter(event.name for event in profiler.events())


def check(
    model: VisionTransformer, accuracies: tuple[float, float], first_epoch: float, ops: Counter[str]
) -> list[str]:
    """Return a message for each failed check."""
    failures = []
    for name, accuracy in zip(("torch's layer norm", "layernorm_ext"), accuracies, strict=True):
        if accuracy < MIN_ACCURACY:
            failures.append(f"the model with {name} reaches {accuracy:.2%}, less than {MIN_ACCURACY:.0%}")
    if abs(accuracies[1] - accuracies[0]) > MAX_ACCURACY_DIFFERENCE:
        failures.append(f"the accuracies differ by more than {100 * MAX_ACCURACY_DIFFERENCE} points")
    if not first_epoch <= MAX_FIRST_EPOCH_DIFFERENCE:  # NaN fails too
        failures.append(f"the losses differ by {first_epoch:.1e} within the first epoch")
    layers = sum(isinstance(module, nn.LayerNorm) for module in model.modules())
    for op in OUR_OPS:
        if ops[op] != layers:
            failures.append(f"{op} ran {ops[op]} times in one step; the model has {layers} layer norms")
    for op in ATEN_OPS:
        if ops[op]:
            failures.append(f"{op} ran {ops[op]} times in the model that should use layernorm_ext alone")
    return failures


def report(runs: tuple[Run, Run], accuracies: tuple[float, float], first_epoch: float, ops: Counter[str]) -> None:
    """Print the summary."""
    milliseconds = [1e3 * np.median(run.seconds) for run in runs]
    low, ratio, high = np.quantile(np.divide(runs[1].seconds, runs[0].seconds), [0.25, 0.5, 0.75])
    final = [np.mean(run.losses[-10:]) for run in runs]
    print()
    print(f"                        {'torch':>10}  {'layernorm_ext':>13}")
    print(f"test accuracy           {accuracies[0]:>10.2%}  {accuracies[1]:>13.2%}")
    print(f"loss, last 10 steps     {final[0]:>10.4f}  {final[1]:>13.4f}")
    print(f"median time per step    {milliseconds[0]:>7.2f} ms  {milliseconds[1]:>10.2f} ms")
    print()
    print(f"time, ours / torch      {ratio:.3f} (middle half of all pairs: {low:.3f} to {high:.3f})")
    print(f"losses in first epoch   differ by {first_epoch:.1e} at most")
    seen = [f"{op} {ops[op]}x" for op in OUR_OPS] + [f"torch's layer norm {sum(ops[op] for op in ATEN_OPS)}x"]
    print(f"operators in our step   {', '.join(seen)}")


def plot(runs: tuple[Run, Run], accuracies: tuple[float, float], steps_per_epoch: int, path: str) -> None:
    """Draw both loss curves, and their difference below."""
    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=(3, 1))
    epoch = np.ones(steps_per_epoch) / steps_per_epoch
    epochs = np.arange(len(runs[0].losses)) / steps_per_epoch
    # The curves nearly coincide; a wide pale line below a thin dashed line keeps both visible.
    styles = ({"color": "#f4b06a", "linewidth": 7}, {"color": "#16336b", "linestyle": "--"})
    for run, accuracy, style in zip(runs, accuracies, styles, strict=True):
        smooth = np.convolve(run.losses, epoch, mode="valid")
        above.plot(epochs[-len(smooth) :], smooth, label=f"{run.name}: test accuracy {accuracy:.2%}", **style)
    difference = np.abs(np.subtract(runs[1].losses, runs[0].losses))
    below.semilogy(epochs, difference, ".", color="#16336b", markersize=2)
    figure.suptitle("Vision transformer on handwritten digits, same seed, two layer norms")
    above.set_ylabel("training loss\n(mean over an epoch)")
    above.legend()
    below.set(xlabel="epoch", ylabel="difference\nat each step")
    for axes in (above, below):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
