"""Batch inference: `Predictor` maps a model over batches of records; jobs run it on Dask.

records.py reads the input, shards.py writes the results and the manifest, job.py computes one
shard, cluster.py starts or connects to the workers, and driver.py distributes the shards. Only
cluster.py and driver.py need Dask.

Imports `gpt2block.model` and rooms below it; only `gpt2block.apps` may import it.
"""

from gpt2block.bulk.predictor import Predictor, record_seed

__all__ = ["Predictor", "record_seed"]
