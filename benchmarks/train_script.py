"""An ordinary DDP script, run by torchrun and pasted into a cell alike; prints its rate and final loss."""

import json
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
images = torch.randn(4096, 1, 16, 16)
labels = images.mean(dim=(1, 2, 3)).mul(40).long().clamp(-4, 5).add(4)
model = torch.nn.Sequential(
    torch.nn.Conv2d(1, 16, 3, padding=1),
    torch.nn.ReLU(),
    torch.nn.MaxPool2d(2),
    torch.nn.Conv2d(16, 32, 3, padding=1),
    torch.nn.ReLU(),
    torch.nn.MaxPool2d(2),
    torch.nn.Flatten(),
    torch.nn.Linear(512, 10),
)
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
batch_size, warm_up, seconds = 64, 20, float(os.environ.get("BENCH_SECONDS", "4"))
begun, step = 0.0, 0
going = torch.ones(1)
while going.item():
    if step == warm_up:
        dist.barrier()
        begun = time.perf_counter()
    chosen = torch.randint(len(images), (batch_size,))
    loss = F.cross_entropy(model(images[chosen]), labels[chosen])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if step % 10 == 0 and step > warm_up:
        going.fill_(time.perf_counter() - begun < seconds)
        dist.broadcast(going, 0)
took = time.perf_counter() - begun
if rank == 0:
    print(
        "RATE " + json.dumps({"steps_per_s": (step - warm_up) / took, "steps": step, "loss": loss.item()}), flush=True
    )
dist.destroy_process_group()
