"""What a run would cost on a link, before anybody rents it: prediction by simulation."""
