"""Training between real sites, over Flower: transport, keys, messages and files.

What clients and servers compute is in `runtime/`; nothing here depends on a particular method.

plan            what server and sites agree on before they train
wire            messages as JSON and safetensors; nothing is ever unpickled
site            a site: answers the server's messages, trains a round
site_graph      a site's graph, converted to the agreed schema
site_files      a site's files: private memory and models
joining         the transport's interface, the policy of a run, the handshake
collecting      the server's exchange with the sites: ask, check, collect uploads
server          the server's rounds, records and run folder
checkpoint      the server's checkpoint
masks           secure aggregation: its messages, at a site and at the server
keys            certificates and key pairs
deployment      the server's folder and the sites' bundles
superlink       Flower's SuperLink; sites can reach its Fleet API only
control         start, stop and list runs
node            a site's connection to the SuperLink
app             the Flower app: transport at the server, replies at a site
fab/            the Flower app's folder, as Flower wants it
loopback        a whole deployment on one machine, for `polyphily run --engine flower`
flwr_internals  everything of flwr that is not public API
"""
