"""An HTTP server that speaks OpenAI's protocol: `gpt2block serve`.

protocol   requests as they come, checked; errors as they go
service    the thread that runs all requests in one batch
answers    completions, whole and as streams
play       the page at /, and its own addresses
access     a line in the log for each request
app        addresses, limits, keys and metrics
"""
