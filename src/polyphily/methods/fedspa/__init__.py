from polyphily.methods.fedspa.method import FedSPA

__all__ = ["FedSPA"]
