"""Ends while the first of two buckets is on its way; rank 1 has not even started that."""

import os

import torch
import torch.distributed as dist

from lightning_mgwfbp.exchange.buckets import Bucket
from lightning_mgwfbp.exchange.decoupled import DecoupledExchanger
from lightning_mgwfbp.exchange.torch_transport import TorchTransport

dist.init_process_group("gloo")
transport = TorchTransport()
exchanger = DecoupledExchanger(transport, transport.halves(torch.device("cpu")))
buckets = [Bucket([torch.ones(5)]), Bucket([torch.ones(7)])]
exchanger.adopt(buckets)
transport.barrier(key="adopted")
if os.environ["RANK"] == "0":
    buckets[0].pack([torch.ones(5)], [True])
    exchanger.start(buckets[0], key="bucket 0")
else:
    os._exit(0)  # at once, while rank 0 is ending
