"""`cluster.kind = "ray"`: Ray places the processes of a run on the nodes of a cluster, and is asked nothing else.

`launcher` is what the supervisor sees. It starts `driver`, the one process that speaks with Ray, whose actors run
`node_process`: each starts and watches one process of the run. `checks` and `placement` say beforehand whether all of it
fits, `own_cluster` starts a cluster on this machine if there is none.
"""
