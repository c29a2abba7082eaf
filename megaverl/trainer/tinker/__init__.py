"""Server with Tinker's API (`megaverl serve tinker`): clients train LoRA adapters of one base model side by side.

    client (`tinker` package)       http_server, service              program                worker, on every rank
    POST forward_backward     -->   QueuedRequest, request id -->  await the call   -->   activate the slot, compute
    POST retrieve_future      <--   waits for its promise  <--  result           <--   log-probs, loss

`protocol` reads and writes the messages of the client, `checkpoints` keeps what
clients save, and `command` builds the model, the engines and the workers.
"""
