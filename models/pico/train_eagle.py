"""Trains a draft head on pico: `python models/pico/train_eagle.py --method eagle --steps 160 --out DIR`."""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pico_checkpoint
import pico_data
import pico_eagle_checkpoint
import torch
from pico_config import read_config
from pico_eagle import DRAFT_STEPS, HEADS, Head, target_states
from pico_model import Pico
from pico_warm_start import warm_start
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional
from train import LEAST_TOKENS, Recipe

HERE = Path(__file__).resolve().parent
ROWS_SHARE = 0.25
"""Of the rows of a window, in the loss."""


def loss(head: Head, target: Pico, tokens: Tensor, generator: torch.Generator) -> Tensor:
    """Mean over the draft steps of the KL to pico's own distribution, in nats a token.

    Of a random part of the rows, the same in each step and window: the vocabulary is most of the work.
    """
    seen = target_states(target, tokens)
    rows = tokens.shape[1] - DRAFT_STEPS
    some = torch.randperm(rows, generator=generator)[: max(1, int(rows * ROWS_SHARE))]
    parts = []
    for step, states in enumerate(head.drafts(target, tokens, seen), start=1):
        with torch.no_grad():
            own = target.logits(seen[-1][:, some + step]).log_softmax(-1)
        draft = target.logits(states[:, some]).log_softmax(-1)
        parts.append(
            functional.kl_div(draft.flatten(0, 1), own.flatten(0, 1), log_target=True, reduction="batchmean")
        )
    return torch.stack(parts).mean()


@torch.no_grad()
def agreement(head: Head, target: Pico, stream: Tensor, window: int, windows: int) -> list[float]:
    """How often each draft step has pico's own first choice, over the first windows of `stream`."""
    totals = [0.0] * DRAFT_STEPS
    windows = min(windows, len(stream) // window)
    for start in range(0, windows * window, window):
        tokens = stream[None, start : start + window]
        seen = target_states(target, tokens)
        chosen = target.logits(seen[-1]).argmax(-1)
        for step, states in enumerate(head.drafts(target, tokens, seen), start=1):
            draft = target.logits(states).argmax(-1)
            totals[step - 1] += (draft == chosen[:, step:]).float().mean().item()
    return [total / windows for total in totals]


def train(
    head: Head,
    target: Pico,
    stream: Tensor,
    held_out: Tensor,
    recipe: Recipe,
    report: Callable[[str], None],
    warm_start_tokens: int = 40_960,
) -> None:
    """Run the recipe with pico as it is: only the head learns."""
    target.eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(recipe.seed)
    warm_start(head, target, pico_data.batch(stream, recipe.window, warm_start_tokens, generator)[:, :-1])
    optimizer = torch.optim.AdamW(head.parameters(), lr=recipe.adamw_lr, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, recipe.lr_factor)
    for step in range(recipe.steps):
        started = time.monotonic()
        window = recipe.window_at(step)
        tokens = pico_data.batch(stream, window, recipe.batch_tokens, generator)[:, :-1]
        value = loss(head, target, tokens, generator)
        value.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        report(
            f"step {step + 1}/{recipe.steps} window {window} loss {value.item():.4f} "
            f"{time.monotonic() - started:.2f} s"
        )
        if (step + 1) % max(1, recipe.steps // 10) == 0 or step + 1 == recipe.steps:
            shares = agreement(head, target, held_out, recipe.long_window, windows=4)
            report("held-out agreement " + " ".join(f"{share:.2f}" for share in shares))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", choices=list(HEADS), required=True)
    parser.add_argument("--steps", type=int, required=True, help="160 gives heads like the committed ones")
    parser.add_argument("--out", type=Path, required=True, help="directory to write the checkpoint to")
    parser.add_argument("--target", type=Path, default=HERE, help="pico's directory")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch-tokens", type=int, default=2048, help="a multiple of 1024")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    recipe = Recipe(steps=args.steps, batch_tokens=args.batch_tokens, seed=args.seed)
    tokenizer = Tokenizer.from_file(str(args.target / "tokenizer.json"))
    text = pico_data.read_standard_library()
    wanted = max(LEAST_TOKENS, recipe.steps * recipe.batch_tokens)
    stream = pico_data.tokens(pico_data.shuffled(text.train, args.seed), tokenizer, wanted)
    held_out = pico_data.tokens(pico_data.shuffled(text.held_out, args.seed), tokenizer, 4 * 1024)
    head = HEADS[args.method](read_config(args.target / "config.json"))
    _say(f"{sum(p.numel() for p in head.parameters()):,} parameters, {len(stream):,} tokens")
    train(head, pico_checkpoint.load(args.target), stream, held_out, recipe, _say)
    pico_eagle_checkpoint.save(head, args.method, args.target, args.out)
    _say(f"wrote {args.out}")


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
