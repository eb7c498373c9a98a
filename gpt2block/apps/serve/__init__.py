"""An HTTP server that speaks OpenAI's protocol: `gpt2block serve`.

It has an engine's side, one process, and HTTP sides, in this process or in several others. Each
HTTP side is connected to the engine's side by a channel.

engine_server   the process of the server, which starts the HTTP sides and ends them
engine_host     the engine: the batch, other forward passes, metrics
engine_end      the engine's end of a channel
service         the thread that runs all requests in one batch
channel         messages between the two sides
http_end        the HTTP side's end of a channel
http_server     an HTTP side, and its process
app             endpoints, limits and keys
access          checks of headers, request ids, and a log line for each request
protocol        validation of requests; errors in OpenAI's format
answers         completions, whole and as streams
play            the page at /, and the endpoints that only this page uses
"""
