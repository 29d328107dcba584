"""Trials behind the default settings: FedAvg's validation score, one setting changed at a time.

    python benchmarks/defaults.py --cells cora:louvain-capped:10 chameleon:metis:5 --backbones gcn

Prints one line per trial: cell, backbone, change, validation and test score (mean over seeds,
received view, best validation round). Defaults are chosen on the validation column alone.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

import polyphily

BASE = {"optimizer": "adam", "lr": 0.01, "weight_decay": 0.0, "dropout": 0.5}
BASE |= {"input_dropout": 0.0, "keep_optimizer": False, "hidden": 64}
KEEP = {"keep_optimizer": True}
CHANGES: dict[str, dict[str, object]] = {
    "base": {},
    "lr 0.003": {"lr": 0.003},
    "lr 0.03": {"lr": 0.03},
    "wd 5e-4": {"weight_decay": 5e-4},
    "dropout 0.2": {"dropout": 0.2},
    "input dropout 0.5": {"input_dropout": 0.5},
    "keep moments": KEEP,
    "keep, input 0.5": {**KEEP, "input_dropout": 0.5},
    "keep, lr 0.003": {**KEEP, "lr": 0.003},
    "keep, lr 0.003, input 0.5": {**KEEP, "lr": 0.003, "input_dropout": 0.5},
    "sgd 0.2": {"optimizer": "sgd", "lr": 0.2},
    "sgd 1": {"optimizer": "sgd", "lr": 1.0},
    "sgd 0.2, momentum 0.9": {"optimizer": "sgd", "lr": 0.2, "momentum": 0.9},
    "sgd 0.2, input 0.5": {"optimizer": "sgd", "lr": 0.2, "input_dropout": 0.5},
    "sgd 0.5, input 0.5": {"optimizer": "sgd", "lr": 0.5, "input_dropout": 0.5},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", nargs="+", default=["cora:louvain-capped:10"])
    parser.add_argument("--partitions", help="folder of files DATASET-PARTITION-CLIENTS-SEED.npz")
    parser.add_argument("--backbones", nargs="+", default=["gcn", "acm-gcn"])
    parser.add_argument("--changes", nargs="+", default=list(CHANGES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--minutes", type=float, default=60.0)
    args = parser.parse_args()
    began = time.monotonic()
    for cell in args.cells:
        dataset, partition, clients = cell.split(":")
        federations = [
            polyphily.load(
                dataset,
                partition=f"{args.partitions}/{dataset}-{partition}-{clients}-{seed}.npz"
                if args.partitions
                else partition,
                clients=int(clients),
                seed=seed,
            )
            for seed in args.seeds
        ]
        for backbone in args.backbones:
            for change in args.changes:
                if time.monotonic() - began > 60 * args.minutes:
                    return
                settings = BASE | CHANGES[change]
                try:
                    summary = polyphily.run(
                        "fedavg",
                        federations,
                        backbone=backbone,
                        rounds=args.rounds,
                        epochs=args.epochs,
                        device=args.device,
                        evaluate_every=2,
                        **settings,
                    ).summary
                except (polyphily.PolyphilyError, torch.OutOfMemoryError) as error:
                    print(cell, backbone, change, "failed:", error, flush=True)
                    continue
                metric = summary["selection"]["metric"]
                best = summary["views"]["received"]["best_val"]
                trained = summary["views"]["trained"]["best_val"]
                row = {
                    "cell": cell,
                    "backbone": backbone,
                    "change": change,
                    "metric": metric,
                    "val": best["val"][metric],
                    "test": best["test"][metric],
                    "trained_val": trained["val"][metric],
                    "trained_test": trained["test"][metric],
                    "ms": 1000 * summary["seconds_per_round_median"],
                }
                print(
                    f"{cell:28s} {backbone:8s} {change:22s} val {100 * row['val']:.2f} "
                    f"test {100 * row['test']:.2f} trained {100 * row['trained_test']:.2f} "
                    f"{row['ms']:.1f} ms",
                    flush=True,
                )
                if args.out:
                    with args.out.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
