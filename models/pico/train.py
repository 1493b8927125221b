"""Trains pico from scratch: `python models/pico/train.py --steps 1200 --out DIR` (numbers: NOTES.md)."""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pico_checkpoint
import pico_data
import torch
from pico_config import read_config
from pico_model import Pico
from pico_muon import Muon
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

HERE = Path(__file__).resolve().parent
LEAST_TOKENS = 1_000_000
"""Of text to draw windows from: a short run would otherwise see the same few files again and again."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a run is; every schedule is a share of `steps`, so that a short run is a whole one in small."""

    steps: int
    batch_tokens: int = 4096
    window: int = 256
    long_window: int = 1024
    long_share: float = 0.15
    """The last part of the run sees windows of `long_window`."""
    warmup_share: float = 0.03
    decay_share: float = 0.6
    muon_lr: float = 0.02
    adamw_lr: float = 0.003
    draft_weight: float = 0.3
    balance_rate: float = 0.02
    """Of the router's bias, in sigmoid units a step; follows the learning rate."""
    bf16: bool = True
    seed: int = 0

    def window_at(self, step: int) -> int:
        return self.long_window if step >= self.steps * (1 - self.long_share) else self.window

    def lr_factor(self, step: int) -> float:
        """Linear up, constant, linear down to a twentieth."""
        up = (step + 1) / max(1.0, self.steps * self.warmup_share)
        down = (self.steps - step) / (self.steps * self.decay_share)
        return min(1.0, up, max(0.05, down))


@dataclass(frozen=True, slots=True)
class Held:
    """What held-out text says: nats a token, and how often each draft step agrees with the trunk."""

    loss: float
    agreement: tuple[float, float]


def losses(model: Pico, windows: Tensor) -> tuple[Tensor, Tensor]:
    """Next-token loss of the trunk, and the mean of both draft steps' KL to the trunk's own distribution."""
    inputs, targets = windows[:, :-1], windows[:, 1:]
    states = model.states(inputs)
    logits = model.logits(states)
    own = logits.detach().log_softmax(-1)
    steps = model.drafts(inputs, states)
    kl = [
        functional.kl_div(
            draft.log_softmax(-1).flatten(0, 1),
            own[:, ahead:].flatten(0, 1),
            log_target=True,
            reduction="batchmean",
        )
        for ahead, draft in enumerate(steps, start=1)
    ]
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten()), (kl[0] + kl[1]) / 2


@torch.no_grad()
def evaluate(model: Pico, stream: Tensor, window: int, windows: int) -> Held:
    """Over the first windows of `stream`, one after the other, in float32."""
    model.eval()
    loss, agreement = 0.0, [0.0, 0.0]
    windows = min(windows, (len(stream) - 1) // window)
    for start in range(0, windows * window, window):
        row = stream[None, start : start + window + 1]
        states = model.states(row[:, :-1])
        logits = model.logits(states)
        loss += functional.cross_entropy(logits[0], row[0, 1:]).item()
        chosen = logits.argmax(-1)
        for ahead, draft in enumerate(model.drafts(row[:, :-1], states), start=1):
            agreement[ahead - 1] += (draft.argmax(-1) == chosen[:, ahead:]).float().mean().item()
    model.train()
    return Held(loss / windows, (agreement[0] / windows, agreement[1] / windows))


def optimizers(model: Pico, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the hidden matrices; AdamW for embedding, head, router and norms."""
    muon, adamw = [], []
    for name, parameter in model.named_parameters():
        apart = parameter.dim() < 2 or any(part in name for part in ("embed_tokens", "lm_head", "mlp.gate."))
        (adamw if apart else muon).append(parameter)
    return [
        Muon(muon, lr=recipe.muon_lr, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(adamw, lr=recipe.adamw_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def train(
    model: Pico, stream: Tensor, held_out: Tensor, recipe: Recipe, report: Callable[[str], None]
) -> None:
    """Run the recipe over `stream`; a line for each step, and held-out ones at each tenth of the run."""
    generator = torch.Generator().manual_seed(recipe.seed)
    both = optimizers(model, recipe)
    schedules = [torch.optim.lr_scheduler.LambdaLR(one, recipe.lr_factor) for one in both]
    model.train()
    for step in range(recipe.steps):
        started = time.monotonic()
        window = recipe.window_at(step)
        windows = pico_data.batch(stream, window, recipe.batch_tokens, generator)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=recipe.bf16):
            trunk, drafts = losses(model, windows)
        (trunk + recipe.draft_weight * drafts).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for one in both:
            one.step()
            one.zero_grad(set_to_none=True)
        for schedule in schedules:
            schedule.step()
        low, high = _balance(model, recipe.balance_rate * recipe.lr_factor(step))
        report(
            f"step {step + 1}/{recipe.steps} window {window} loss {trunk.item():.4f} "
            f"drafts {drafts.item():.4f} expert load {low:.0%}-{high:.0%} {time.monotonic() - started:.2f} s"
        )
        if (step + 1) % max(1, recipe.steps // 10) == 0 or step + 1 == recipe.steps:
            held = evaluate(model, held_out, recipe.long_window, windows=8)
            first, second = held.agreement
            report(f"held-out loss {held.loss:.4f} draft agreement {first:.2f} {second:.2f}")


def _balance(model: Pico, rate: float) -> tuple[float, float]:
    """Balance every router; returns the smallest and largest share that an expert had in this step."""
    shares = [gate.load / gate.load.sum() for gate in model.gates()]
    for gate in model.gates():
        gate.balance(rate)
    return min(s.min().item() for s in shares), max(s.max().item() for s in shares)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True, help="1200 gives a model like the committed one")
    parser.add_argument("--out", type=Path, required=True, help="directory to write the checkpoint to")
    parser.add_argument(
        "--source", type=Path, default=HERE, help="directory of config.json and the tokenizer"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="one is faster than two on a shared machine")
    parser.add_argument("--batch-tokens", type=int, default=4096, help="a multiple of 1024")
    parser.add_argument(
        "--dtype", choices=["auto", "bf16", "fp32"], default="auto", help="auto: what is faster"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    # Without AVX-512 a bf16 product takes several times as long as one in float32.
    fast = torch.backends.cpu.get_cpu_capability() == "AVX512"
    recipe = Recipe(
        steps=args.steps,
        batch_tokens=args.batch_tokens,
        bf16=fast if args.dtype == "auto" else args.dtype == "bf16",
        seed=args.seed,
    )
    tokenizer = Tokenizer.from_file(str(args.source / "tokenizer.json"))
    text = pico_data.read_standard_library()
    wanted = max(LEAST_TOKENS, recipe.steps * recipe.batch_tokens)
    stream = pico_data.tokens(pico_data.shuffled(text.train, args.seed), tokenizer, wanted)
    held_out = pico_data.tokens(pico_data.shuffled(text.held_out, args.seed), tokenizer, 8 * 1024 + 1)
    model = Pico(read_config(args.source / "config.json"))
    _say(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(stream):,} tokens")
    train(model, stream, held_out, recipe, _say)
    pico_checkpoint.save(model, args.source, args.out)
    _say(f"wrote {args.out}")


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
