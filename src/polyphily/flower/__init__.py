"""The same methods on Flower: a server, sites that keep their graphs, messages between them.

Nothing here knows a particular method, and nothing outside this package imports flwr.

plan         what server and sites agree on before they train
wire         messages as JSON and safetensors; nothing is ever unpickled
site         a site: its graph, its private memory on disk, one round of training
server       the server's rounds: ask, check, aggregate, write down
keys         certificates and key pairs
deployment   the server's folder and the sites' bundles
superlink    Flower's SuperLink, of which sites reach the Fleet API only
node         a site's connection to the SuperLink
app          the Flower app: ServerApp and ClientApp
loopback     everything on one machine, for `polyphily run --engine flower`
"""
