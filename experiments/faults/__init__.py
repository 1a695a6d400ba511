"""How runs, sweeps and servers take kills, cut connections and growing sizes."""
