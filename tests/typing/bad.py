"""What type checkers refuse, on each line marked `# wrong` and on no other. Read by type checkers, never run."""

from __future__ import annotations

from torch import nn

import plait
from plait import Layout, Runner, Strategy, prepare

model = nn.Linear(1, 1)

Runner(model, [1], strateggy={"zero": 3})  # wrong
Runner(model, [1], strategy=3)  # wrong
Runner(model, [1], device="gpu")  # wrong
Runner(model, [1], seed="1")  # wrong
Runner(model, [1], plan="on")  # wrong
Runner(model, [1], hooks=[plait.Strategy()])  # wrong
Runner(model, [1], optim=plait.Batch(total=1))  # wrong
Runner(model, [1], metrics=[3])  # wrong
Runner.from_config("run.yaml", metrics="loss")  # wrong
Strategy(zeroo=3)  # wrong
Strategy(zero="3")  # wrong
Strategy(layout=plait.Batch())  # wrong
Strategy(recompute=plait.Recompute(mode="half"))  # wrong
Layout(tp=2.5)  # wrong
plait.AdamWOptim(momentum=0.9)  # wrong
plait.SGDOptim(lr="0.1")  # wrong
plait.Log(sinks=("paper",))  # wrong
plait.TextData(seq_len=8)  # wrong
prepare(model, strateggy="zero3")  # wrong
prepare(model, accumulation="2")  # wrong
prepare(3)  # wrong
plait.part()  # wrong
print(plait.Trainer)  # wrong
