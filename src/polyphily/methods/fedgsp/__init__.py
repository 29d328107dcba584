from polyphily.methods.fedgsp.method import FedGSP

__all__ = ["FedGSP"]
