"""Train a small vision transformer twice, with torch's layer norm and with layernorm_ext's, and compare.

    python benchmarks/train_digits.py

takes about a minute on two CPU cores. scikit-learn contains the images, 1,797 handwritten digits of 8x8 pixels, so
nothing is downloaded. Both models start from the same parameters and train in turn on the same batches, so any
difference comes from the layer norm.

The script fails if an accuracy is too low, if the accuracies or the losses of the first epoch differ, or if the
profiler does not see the operators of layernorm_ext for every layer and none of torch's.
"""

import argparse
import copy
import sys
import time
from collections import Counter
from collections.abc import Iterator
from statistics import mean, quantiles

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.profiler import ProfilerActivity, profile

import layernorm_ext

TEST_IMAGES, EPOCHS, BATCH_SIZE = 360, 40, 64
MIN_ACCURACY = 0.97
# Two correct layer norms round differently, and every training step magnifies the difference. It is tiny in the first
# epoch; at the end, the models may classify a few images differently (1.5 points are 5 of 360).
MAX_ACCURACY_DIFFERENCE = 0.015
MAX_FIRST_EPOCH_DIFFERENCE = 1e-5

ATEN_OPS = ("aten::layer_norm", "aten::native_layer_norm", "aten::native_layer_norm_backward")
OUR_OPS = ("layernorm::forward", "layernorm::backward")


class VisionTransformer(nn.Module):
    """Classifies (batch, 8, 8) images of digits, each cut into 16 patches of 2x2 pixels."""

    def __init__(self, width: int = 64, depth: int = 4, heads: int = 4) -> None:
        super().__init__()
        # The first convolution detects edges; there are too few images to learn that with attention alone.
        self.embed = nn.Sequential(
            nn.Conv2d(1, 32, kernel_size=3, padding=1), nn.GELU(), nn.Conv2d(32, width, kernel_size=2, stride=2)
        )
        self.position = nn.Parameter(0.5 * torch.randn(16, width))
        options = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        self.blocks = nn.Sequential(
            *(nn.TransformerEncoderLayer(width, heads, 2 * width, **options) for _ in range(depth))
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Map (batch, 8, 8) to (batch, 10)."""
        patches = self.embed(images.unsqueeze(1)).flatten(2).transpose(1, 2)  # (batch, 16, width)
        x = self.norm(self.blocks(patches + self.position))
        return self.head(x.mean(dim=1))

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self(images), labels, label_smoothing=0.1)

    @torch.no_grad()
    def accuracy(self, images: Tensor, labels: Tensor) -> float:
        """Return the fraction of images that the model labels correctly."""
        return (self(images).argmax(dim=1) == labels).double().mean().item()


class Run:
    """A model in training, with the losses and durations of its steps."""

    def __init__(self, model: VisionTransformer, steps: int) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
        self.schedule = OneCycleLR(self.optimizer, 3e-3, total_steps=steps)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self, *batch: Tensor) -> None:
        """Take one training step; record its loss and its duration."""
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = self.model.loss(*batch)
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())  # item() waits for the device
        self.seconds.append(time.perf_counter() - start)
        self.schedule.step()


def load(device: str) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return (images, labels) for training and for testing, with pixels between -1 and 1."""
    pixels, labels = load_digits(return_X_y=True)
    images = (pixels / 8 - 1).reshape(-1, 8, 8).astype("float32")
    split = train_test_split(images, labels, test_size=TEST_IMAGES, stratify=labels, random_state=0)
    train_images, test_images, train_labels, test_labels = (torch.from_numpy(a).to(device) for a in split)
    return (train_images, train_labels), (test_images, test_labels)


def shifted_batches(images: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of all epochs, with every image shifted by up to one pixel in each direction."""
    height, width = images.shape[1:]
    windows = F.pad(images, (1, 1, 1, 1), value=-1).unfold(1, height, 1).unfold(2, width, 1)  # (n, 3, 3, height, width)
    for _ in range(EPOCHS):
        order = torch.randperm(len(images)).to(images.device)
        for chosen in order[: len(images) // BATCH_SIZE * BATCH_SIZE].split(BATCH_SIZE):
            down, right = torch.randint(3, (2, len(chosen)))
            yield windows[chosen, down, right], labels[chosen]


def count_ops(model: VisionTransformer, images: Tensor, labels: Tensor) -> Counter[str]:
    """Count the operators that forward and backward run."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        model.loss(images, labels).backward()
    return Counter(event.name for event in profiler.events())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    train, test = load(parser.parse_args().device)
    steps_per_epoch = len(train[0]) // BATCH_SIZE
    torch.manual_seed(0)
    theirs = VisionTransformer().to(test[0].device)
    model = copy.deepcopy(theirs)
    print(layernorm_ext.convert(model))
    reference, ours = (Run(each, EPOCHS * steps_per_epoch) for each in (theirs, model))
    for step, batch in enumerate(shifted_batches(*train)):
        # The order alternates, because the second model finds the batch and the allocator's memory in the caches.
        for run in (reference, ours) if step % 2 else (ours, reference):
            run.step(*batch)

    accuracies = [run.model.accuracy(*test) for run in (reference, ours)]
    losses = [mean(run.losses[-10:]) for run in (reference, ours)]
    print(f"test accuracy           torch {accuracies[0]:.2%}, layernorm_ext {accuracies[1]:.2%}")
    print(f"loss, last 10 steps     torch {losses[0]:.4f}, layernorm_ext {losses[1]:.4f}")
    low, ratio, high = quantiles(a / b for a, b in zip(ours.seconds, reference.seconds, strict=True))
    print(f"time, ours / torch      {ratio:.3f} (middle half of all pairs: {low:.3f} to {high:.3f})")
    differences = [abs(a - b) for a, b in zip(ours.losses, reference.losses, strict=True)]
    difference = max(differences[:steps_per_epoch])
    print(f"losses                  differ by {difference:.1e} in the first epoch, {max(differences):.1e} in all")

    layers = sum(isinstance(module, nn.LayerNorm) for module in model.modules())
    ops = count_ops(model, *(t[:BATCH_SIZE] for t in train))
    checks = {
        f"each model labels {MIN_ACCURACY:.0%} of the test images correctly": min(accuracies) >= MIN_ACCURACY,
        f"the accuracies differ by at most {100 * MAX_ACCURACY_DIFFERENCE} points": (
            abs(accuracies[1] - accuracies[0]) <= MAX_ACCURACY_DIFFERENCE
        ),
        f"the losses of the first epoch differ by at most {MAX_FIRST_EPOCH_DIFFERENCE}": (
            difference <= MAX_FIRST_EPOCH_DIFFERENCE
        ),
        f"{', '.join(OUR_OPS)} run {layers} times in a step": all(ops[op] == layers for op in OUR_OPS),
        f"{', '.join(ATEN_OPS)} do not run": not any(ops[op] for op in ATEN_OPS),
    }
    for check, passes in checks.items():
        print(f"{'ok' if passes else 'FAILED'}: {check}")
    sys.exit(not all(checks.values()))


if __name__ == "__main__":
    main()
