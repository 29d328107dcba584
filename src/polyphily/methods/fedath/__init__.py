from polyphily.methods.fedath.method import FedATH

__all__ = ["FedATH"]
