"""Time a round of the stacked engine and of the sequential one, in one process.

    python benchmarks/rounds.py --dataset cora --partition louvain-capped --clients 10 20

The time is the median over rounds of broadcast, local training and aggregation, without scoring.
The accuracies are printed too, as a check that both engines learn the same.
"""

from __future__ import annotations

import argparse
import statistics

import torch

import polyphily
from polyphily.core.method import create
from polyphily.core.metrics import Evaluator
from polyphily.core.recipes import fill
from polyphily.engines.simulation import Simulation


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="cora")
    parser.add_argument("--partition", default="louvain-capped", help="{clients} is filled in")
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 20])
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--backbone", default="gcn")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    where = torch.cuda.get_device_name() if args.device != "cpu" else f"cpu, {args.threads} threads"
    network = f"{args.backbone}-{args.hidden}"
    print(f"{args.method}, {args.dataset}, {network}, {args.epochs} epochs, {where}")
    print("clients  sequential ms  stacked ms  ratio  accuracy (sequential, stacked)")
    for clients in args.clients:
        where = args.partition.format(clients=clients)
        federation = polyphily.load(args.dataset, partition=where, clients=clients)
        times, accuracies = [], []
        for engine in ("sequential", "stacked"):
            settings = polyphily.Settings(
                rounds=args.rounds,
                epochs=args.epochs,
                backbone=args.backbone,
                hidden=args.hidden,
                engine=engine,
                device=args.device,
            )
            filled = fill(settings, federation.kind, federation.metric, dense=federation.dense)
            simulation = Simulation(create(args.method), [federation], filled)
            seconds = [simulation.advance().seconds for _ in range(args.rounds)]
            times.append(1000 * statistics.median(seconds[3:]))
            evaluator = Evaluator(federation.clients, len(federation.classes), simulation.device)
            scores = evaluator.scores(simulation.predict(simulation.received())).cpu().numpy()
            weights = evaluator.counts[:, 1]
            accuracies.append((scores[:, 1, 0] * weights).sum() / weights.sum())
        print(
            f"{clients:7d}  {times[0]:13.1f}  {times[1]:10.2f}  {times[0] / times[1]:5.1f}  "
            f"{100 * accuracies[0]:.2f}, {100 * accuracies[1]:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
