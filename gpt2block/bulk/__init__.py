"""Many records: `Predictor`, a model as a function of batches, and the job that runs it on Dask.

records.py reads the input, shards.py writes results and the manifest, job.py says what is done with
a shard, cluster.py finds the workers and driver.py keeps them busy. Only the last two need Dask.
"""

from gpt2block.bulk.predictor import Predictor, record_seed

__all__ = ["Predictor", "record_seed"]
