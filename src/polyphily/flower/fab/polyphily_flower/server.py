"""The server's part of the app."""

from flwr.serverapp import ServerApp

from polyphily.flower.app import serve

app = ServerApp()
app.main()(serve)
