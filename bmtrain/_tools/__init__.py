"""Commands for people: doctor, launch, soak. Nothing below imports them."""
