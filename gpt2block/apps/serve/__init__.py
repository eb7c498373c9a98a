"""An HTTP server that speaks OpenAI's protocol: `gpt2block serve`.

protocol   validation of requests; errors in OpenAI's format
service    the thread that runs all requests in one batch
answers    completions, whole and as streams
play       the page at /, and the endpoints that only this page uses
access     checks of headers, request ids, and a log line for each request
app        endpoints, limits, keys and metrics
"""
