"""A site's part of the app."""

from flwr.clientapp import ClientApp

from polyphily.flower.app import respond

app = ClientApp()
app.train()(respond)
