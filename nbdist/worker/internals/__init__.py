"""Everything of nbdist that touches private parts of torch, in one place.

Written against torch 2.9 to 2.13. What is used, and why there is no public way:

========================================  =====================================================================
``distributed_c10d._world``               lists the groups that exist, with name, ranks and backend
``_new_process_group_helper``             makes a group under a given name, so that device meshes, which hold
                                          names, find the new group where they had the old one
``_abort_process_group``'s parts          ``abort()`` of every NCCL communicator inside one NCCL group call
``_dump_nccl_trace_json``                 tells which collective NCCL is in
``FSDPModule._get_fsdp_state()``          the groups FSDP2 has put aside in each module's mesh info
``DistributedDataParallel.__dict__``      what ``__init__`` resets when it is run again
``_dynamo.eval_frame`` (C++)              marks a function as not to be compiled, without importing all of Dynamo
========================================  =====================================================================
"""

from nbdist.worker.internals.groups import (
    GroupRecord,
    abort_communicators,
    default_timeout,
    issued,
    make_default_group,
    make_subgroup,
    nccl_operation,
    on_group_made,
    records,
    replace_everywhere,
    reserve_names,
    tear_down,
)
from nbdist.worker.internals.modules import (
    attach_ddp,
    attach_fsdp,
    mesh_groups,
    never_trace,
    refresh_mesh,
    replace_groups,
)

__all__ = [
    "GroupRecord",
    "abort_communicators",
    "attach_ddp",
    "attach_fsdp",
    "default_timeout",
    "issued",
    "make_default_group",
    "make_subgroup",
    "mesh_groups",
    "nccl_operation",
    "never_trace",
    "on_group_made",
    "records",
    "refresh_mesh",
    "replace_everywhere",
    "replace_groups",
    "reserve_names",
    "tear_down",
]
