"""Trains m3-nano as the MSA paper (arXiv 2606.13392) does: `python train.py DATA OUT --seconds 1200`.

Stage 1: full attention, while the index branch learns the main branch's attention by KL divergence. Stage 2: attention
over the blocks that the index branch selects, the divergence over the selected tokens. The schedule runs over seconds
of training, not steps, so that it fits a rented machine.

OUT gets the float32 weights (`checkpoint.save_master`) and train.log each minute, resume.pt with the optimizer beside
them. A second call with the same OUT goes on where the first was; `--init FOLDER` starts from weights alone.
"""

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from checkpoint import load_master, save_master, tokenizer_sha256
from evaluate import score_answers
from model import INDEX_PARAMETERS, SMALL, Model, ModelConfig, Pass, Stage, Way
from rows import Data, Row, Rows, held_out_rows

WARM_UP = 200  #: steps
RESTART_WARM_UP = 50  #: steps after a start with fresh optimizer state
LAST_RATE = 0.02  #: of the learning rate, at the end of the cosine
BIAS_STEP = 2e-3  #: by which a step moves the router's bias of an expert, at the beginning
LOG_STEPS = 50


@dataclass
class Options:
    """What the command line gives. seconds: of training in all, over all calls."""

    data: Path
    out: Path
    seconds: float = 1170
    batch: int = 32
    rate: float = 3e-3
    stage1: float = 0.22  #: share of the time that stage 1 takes
    index_rows: int = 128  #: queries per sequence in the index loss
    workers: int = 15  #: processes that make rows
    evaluate_every: float = 150  #: seconds
    save_every: float = 60
    steps: int = 1 << 30  #: an end before `seconds`
    stop_after: float = math.inf  #: seconds of this call, after which it saves and ends
    device: str = "cuda"
    compile: bool = True
    check: bool = True  #: compare compiled and plain passes before training
    init: Path | None = None
    seed: int = 0  #: of the first weights; rows differ in every start


@dataclass
class State:
    """How far the training is."""

    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    stage2_from: list[int] | None = None  #: step and tokens
    history: list[list[float]] = field(default_factory=list)  #: seconds, step, tokens, stage, entropy, index losses
    evaluations: list[dict[str, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Batch:
    """Ids and targets int64 [B, S], weight float32 [B, S] of each target."""

    ids: Tensor
    targets: Tensor
    weight: Tensor


class RowStream(torch.utils.data.IterableDataset[tuple[Tensor, Tensor]]):
    """Endless batches of rows; every worker process draws its own."""

    def __init__(self, data: Data, context: int, batch: int, seed: int) -> None:
        self._data, self._context, self._batch, self._seed = data, context, batch, seed

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        worker = torch.utils.data.get_worker_info()
        torch.set_num_threads(1)
        rows = Rows(self._data, ctx=self._context, seed=self._seed + (worker.id if worker else 0))
        while True:
            ids, weight, _ = rows.batch(self._batch)
            yield torch.from_numpy(ids), torch.from_numpy(weight)


class Trainer:
    """The model, its optimizer and its data."""

    def __init__(self, options: Options, config: ModelConfig) -> None:
        self.options, self.config = options, config
        _check(options, config)
        self._tokenizer = tokenizer_sha256(options.data)
        started = time.monotonic()
        data = Data.load(options.data)
        self._held_out = held_out_rows(
            Data.load(options.data, held_out=True), config.context, text=8, recall=12, hard=6
        )
        options.out.mkdir(parents=True, exist_ok=True)
        self.log("options " + json.dumps(self._plain_options()))
        seed = 1000 * int(time.time())  # other rows after every start
        # The workers fork here, before CUDA starts.
        self._batches = iter(
            torch.utils.data.DataLoader(
                RowStream(data, config.context, options.batch, seed),
                batch_size=None,
                num_workers=options.workers,
                pin_memory=options.device != "cpu",
                prefetch_factor=4 if options.workers else None,
            )
        )
        self.log(f"data read in {time.monotonic() - started:.1f} s")
        torch.manual_seed(options.seed)
        # TF32 for what is not in bfloat16: the index scores and the router. It tips near-ties, no more.
        torch.set_float32_matmul_precision("high")
        self.dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
        self.state = State()
        self.model = Model(config).to(options.device)
        self._start()
        self._restarted_at = self.state.step
        if options.compile:
            self.model.compile_layers()

    def log(self, text: str) -> None:
        """To the terminal and into train.log."""
        print(text, flush=True)
        with (self.options.out / "train.log").open("a", encoding="utf-8") as file:
            file.write(text + "\n")

    def _start(self) -> None:
        """Goes on from resume.pt, or from weights alone, or begins. Raises ValueError if that is not what was asked."""
        options = self.options
        resume, weights = options.out / "resume.pt", options.init
        if not resume.exists() and (options.out / "master.json").exists():
            weights = options.out  # the optimizer's state was not kept
        if (options.init and weights is not options.init) or (options.init and resume.exists()):
            raise ValueError(f"{options.out}: holds a training already, --init wants an empty folder")
        if resume.exists():
            saved = torch.load(resume, map_location=options.device, weights_only=True)
            self._check_origin(resume, saved)
            self.model.load_state_dict(saved["model"])
            self.optimizer = self._new_optimizer()
            self.optimizer.load_state_dict(saved["optimizer"])
            self.state = State(**saved["state"])
            self.log(f"resumed at step {self.state.step}, {self.state.seconds:.0f} s")
            return
        if weights:
            model, meta = load_master(weights, options.device)
            self._check_origin(weights, meta)
            self.model.load_state_dict(model.state_dict())
            self.state = State(**meta["state"])
            self.log(
                f"{weights}: weights of step {self.state.step}, {self.state.seconds:.0f} s, without optimizer state"
            )
        self.optimizer = self._new_optimizer()
        count = sum(p.numel() for p in self.model.parameters())
        self.log(f"{count} parameters, torch {torch.__version__}, {options.device}")

    def _check_origin(self, path: Path, saved: Mapping[str, Any]) -> None:
        if saved.get("tokenizer_sha256") not in (None, self._tokenizer):
            raise ValueError(f"{path}: was trained with another tokenizer than that of {self.options.data}")

    def _plain_options(self) -> dict[str, str | int | float]:
        """The options as JSON can hold them."""
        return {
            key: value if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)) else str(value)
            for key, value in dataclasses.asdict(self.options).items()
        }

    def _new_optimizer(self) -> torch.optim.AdamW:
        decayed, rest = [], []
        for name, parameter in self.model.named_parameters():
            (decayed if parameter.dim() > 1 and name not in ("embed", "head") else rest).append(parameter)
        groups = [{"params": decayed, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}]
        fused = self.options.device != "cpu"
        return torch.optim.AdamW(groups, lr=self.options.rate, betas=(0.9, 0.95), eps=1e-9, fused=fused)

    # -------------------------------------------------------------------------------------------- steps

    @property
    def progress(self) -> float:
        """0 to 1."""
        return self.state.seconds / self.options.seconds

    @property
    def stage(self) -> Stage:
        return Stage.FULL if self.progress < self.options.stage1 else Stage.SPARSE

    def _pass(self, stage: Stage, offset: int = 0) -> Pass:
        step = self.config.context // self.options.index_rows
        rows = offset + step * torch.arange(self.options.index_rows, device=self.options.device)
        way = Way.TILED if self.options.compile else Way.MASKED
        return Pass(stage, self.dtype, way, rows=rows)

    def _to_device(self, ids: Tensor, weight: Tensor) -> Batch:
        ids = ids.to(self.options.device, non_blocking=True).long()
        weight = weight.to(self.options.device, non_blocking=True)
        return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), weight[:, 1:].contiguous())

    def _rate(self) -> float:
        """Warm-up, then a cosine over the time."""
        since = self.state.step - self._restarted_at
        warm = min(1.0, (self.state.step + 1) / WARM_UP, (since + 1) / RESTART_WARM_UP)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, self.progress)))
        return self.options.rate * warm * (LAST_RATE + (1 - LAST_RATE) * cosine)

    def step(self, batch: Batch, offset: int) -> Tensor:
        """One optimizer step; entropy, index losses and the smallest expert load of every sparse layer."""
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate()
        loss, entropy, out = self.model.losses(batch.ids, batch.targets, batch.weight, self._pass(self.stage, offset))
        loss.backward()
        index = [p for n, p in self.model.named_parameters() if n.split(".")[-1] in INDEX_PARAMETERS]
        main = [p for n, p in self.model.named_parameters() if n.split(".")[-1] not in INDEX_PARAMETERS]
        torch.nn.utils.clip_grad_norm_(main, 1.0)
        torch.nn.utils.clip_grad_norm_(index, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        loads = [x.float().mean((0, 1)) for x in out.experts]
        self.balance(loads)
        self.state.step += 1
        self.state.tokens += batch.ids.numel()
        losses = torch.stack([x.detach() for x in out.losses])
        return torch.cat([entropy[None], losses, torch.stack([x.amin() for x in loads])])

    @torch.no_grad()
    def balance(self, loads: list[Tensor]) -> None:
        """Moves the biases towards equal loads, float32 [experts] of every sparse layer.

        DeepSeek-V3's auxiliary-loss-free balancing, arXiv 2412.19437.
        """
        size = BIAS_STEP * max(0.05, 1 - self.progress)
        for layer, load in zip(self.model.sparse_layers(), loads, strict=True):
            layer.bias += size * torch.sign(load.mean() - load)

    def train(self) -> bool:
        """Until the time is over (True), or an option ends it before (False)."""
        options, state = self.options, self.state
        call_began = time.monotonic()
        began = call_began - state.seconds
        evaluated = saved = state.seconds
        offsets = torch.Generator().manual_seed(state.step)
        sums: list[Tensor] = []
        waited, ticked = 0.0, time.monotonic()
        while self.progress < 1 and state.step < options.steps:
            if time.monotonic() - call_began > options.stop_after:
                return False
            if self.stage is Stage.SPARSE and state.stage2_from is None:
                state.stage2_from = [state.step, state.tokens]
                self.log(f"stage 2 from step {state.step}, {state.tokens / 1e6:.0f} M tokens")
                self.evaluate()
            asked = time.monotonic()
            batch = self._to_device(*next(self._batches))
            waited += time.monotonic() - asked
            step = self.config.context // options.index_rows
            sums.append(self.step(batch, int(torch.randint(step, (1,), generator=offsets))))
            if state.step % LOG_STEPS == 0:
                means = torch.stack(sums).mean(0).tolist()
                rate = len(sums) * batch.ids.numel() / (time.monotonic() - ticked)
                self._report(means, rate, waited)
                if not math.isfinite(means[0]):
                    raise RuntimeError(f"the loss is not finite at step {state.step}; {options.out} has older weights")
                sums, waited, ticked = [], 0.0, time.monotonic()
            state.seconds = time.monotonic() - began
            if state.seconds - evaluated > options.evaluate_every:
                evaluated = state.seconds
                self.evaluate()
            if state.seconds - saved > options.save_every:
                saved = state.seconds
                self.save()
        return self.progress >= 1

    def _report(self, means: list[float], rate: float, waited: float) -> None:
        state, n = self.state, (len(means) - 1) // 2
        losses, loads = means[1 : 1 + n], means[1 + n :]
        stage = self.stage.value
        state.history.append(
            [round(state.seconds, 1), state.step, state.tokens, stage, *(round(x, 4) for x in means[: 1 + n])]
        )
        self.log(
            f"{state.seconds:7.1f} s  step {state.step}  stage {stage}  {state.tokens / 1e6:.1f} M tokens  "
            f"entropy {means[0]:.4f}  index {' '.join(f'{x:.3f}' for x in losses)}  "
            f"least load {' '.join(f'{x:.3f}' for x in loads)}  rate {self._rate():.2e}  "
            f"{rate / 1e6:.2f} M tokens/s  waited {waited:.1f} s"
        )

    # -------------------------------------------------------------------------------------------- looks

    def evaluate(self) -> None:
        """Entropy of held-out text and share of right answers, dense and sparse; into the log and the state."""
        figures: dict[str, float] = {"seconds": round(self.state.seconds, 1), "step": self.state.step}
        for stage in Stage:
            run = Pass(stage, self.dtype)
            name = stage.name.lower()
            entropy = [self._entropy(row, run) for row in self._held_out if row.kind == "text"]
            figures[f"{name} entropy"] = round(float(np.mean(entropy)), 4)
            for kind in ("recall", "hard"):
                right = np.concatenate([self._right(row, run) for row in self._held_out if row.kind == kind])
                figures[f"{name} {kind}"] = round(float(right.mean()), 4)
        self.state.evaluations.append(figures)
        self.log("evaluation " + json.dumps(figures))

    def _logits(self, row: Row, run: Pass) -> Tensor:
        return self.model.logits(torch.from_numpy(row.ids[None, :-1]).to(self.options.device).long(), run)[0][0]

    def _entropy(self, row: Row, run: Pass) -> float:
        targets = torch.from_numpy(row.ids[1:]).to(self.options.device).long()
        return torch.nn.functional.cross_entropy(self._logits(row, run), targets).item()

    def _right(self, row: Row, run: Pass) -> NDArray[np.bool_]:
        return score_answers(self._logits(row, run).argmax(-1).cpu().numpy(), row.ids, row.answer)

    def check(self) -> None:
        """Compares the compiled pass with the plain one in both stages, and measures the speed of a step.

        Raises RuntimeError if they differ by more than bfloat16 does.
        """
        batch = self._to_device(*next(self._batches))
        for stage in Stage:
            run = self._pass(stage)
            started = time.monotonic()
            loss, entropy, out = self.model.losses(batch.ids, batch.targets, batch.weight, run)
            loss.backward()
            self.optimizer.zero_grad()
            torch.cuda.synchronize()
            self.log(f"{stage.name}: compiled in {time.monotonic() - started:.1f} s, entropy {entropy.item():.4f}")
            with torch.no_grad():
                few = batch.ids[:2]
                plain = self.model.body(few, dataclasses.replace(run, way=Way.MASKED), plain=True).x
                other = self.model.body(few, Pass(Stage.FULL, self.dtype), plain=True).x
            # By token, and the median: a near-tie of experts or blocks that rounding tips moves its token a lot.
            difference = float(((out.x.detach()[:2] - plain).norm(dim=-1) / plain.norm(dim=-1)).median())
            scale = float(((other - plain).norm(dim=-1) / plain.norm(dim=-1)).median())
            self.log(f"{stage.name}: compiled against plain {difference:.2e}, full against sparse {scale:.2e}")
            if not difference < 0.02:
                raise RuntimeError(f"{stage.name}: the compiled pass differs from the plain one by {difference:.2e}")
            del loss, out
            for _ in range(2):
                torch.cuda.synchronize()
                started = time.monotonic()
                for _ in range(5):
                    self.model.losses(batch.ids, batch.targets, batch.weight, run)[0].backward()
                    self.optimizer.zero_grad()
                torch.cuda.synchronize()
                seconds = (time.monotonic() - started) / 5
            memory = torch.cuda.max_memory_allocated() / 1e9
            self.log(f"{stage.name}: {batch.ids.numel() / seconds / 1e6:.2f} M tokens/s, {memory:.1f} GB")
        torch.cuda.reset_peak_memory_stats()

    def save(self) -> None:
        """The weights for other programs, and everything for another call."""
        state = dataclasses.asdict(self.state)
        save_master(
            self.options.out,
            self.model,
            {"state": state, "options": self._plain_options(), "tokenizer_sha256": self._tokenizer},
        )
        part = self.options.out / "resume.pt.part"
        saved = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "state": state,
            "tokenizer_sha256": self._tokenizer,
        }
        torch.save(saved, part)
        part.replace(self.options.out / "resume.pt")


def main() -> None:
    """Parses the command line and trains."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("data", type=Path, metavar="DATA")
    parser.add_argument("out", type=Path, metavar="OUT")
    for item in dataclasses.fields(Options)[2:]:
        name = "--" + item.name.replace("_", "-")
        if item.type is bool:
            parser.add_argument(name, action=argparse.BooleanOptionalAction, default=item.default)
        else:
            kind = Path if item.name == "init" else type(item.default)
            parser.add_argument(name, type=kind, default=item.default, help=f"({item.default})")
    parser.add_argument("--small", action="store_true", help="a model for tests: context 512, three layers")
    arguments = vars(parser.parse_args())
    config = SMALL if arguments.pop("small") else ModelConfig()
    try:
        trainer = Trainer(Options(**arguments), config)
        if trainer.options.check and trainer.options.device != "cpu":
            trainer.check()
        finished = False
        try:
            finished = trainer.train()
        except KeyboardInterrupt:
            trainer.log("interrupted")
        trainer.save()
        if finished:
            trainer.evaluate()
            trainer.save()
    except (OSError, ValueError, RuntimeError) as error:
        sys.exit(f"train: {error}")
    if trainer.options.device != "cpu":
        trainer.log(f"peak memory {torch.cuda.max_memory_allocated() / 1e9:.1f} GB")
    trainer.log("finished" if finished else "stopped; the same command goes on")


def _check(options: Options, config: ModelConfig) -> None:
    """Raises ValueError for options that cannot work together, before anything is written."""
    if not (options.data / "tokenizer.json").exists():
        raise ValueError(f"{options.data}: no tokenizer.json there, `make nano-data` makes it")
    if options.seconds <= 0 or options.batch < 1:
        raise ValueError(f"--seconds {options.seconds} and --batch {options.batch}, expected above 0")
    if not 0 < options.index_rows <= config.context:
        raise ValueError(f"--index-rows {options.index_rows}, expected 1 to {config.context}")
    if options.device != "cpu" and not torch.cuda.is_available():
        raise ValueError(f"--device {options.device}: torch finds no GPU")


if __name__ == "__main__":
    main()
