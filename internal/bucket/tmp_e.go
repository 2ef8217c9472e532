package bucket

import "time"

func (d *Definition) Stands() time.Duration {
	if d.Kind == FixedWindow {
		return d.Period
	}
	return d.SlotWidth()
}

func (d *Definition) Slotted() bool { return d.Kind == SlidingWindow }

type Out struct {
	Tokens float64
	Until  time.Time
}

func (d *Definition) CreditBeside(s State, out Out, now time.Time, n float64) State {
	if out.Until.After(now) {
		held := d.Settle(s, now).Slots.Held(0)
		n = min(n, max(0, held-out.Tokens))
	}
	return d.Credit(s, now, n)
}

func (d *Definition) Full(key string, out Out, s State, now time.Time) State {
	full := d.Fresh(key, now)
	if !out.Until.After(now) {
		return full
	}
	if d.Slotted() {
		return d.give(full, out.Tokens, 0)
	}
	if d.Kind == FixedWindow {
		full.TS = d.Settle(s, now).TS
		full.Value -= out.Tokens
		return full
	}
	full.Value -= out.Tokens + d.Rate*float64(out.Until.Sub(now))/float64(d.Period)
	return full
}

// FloorAtOnce is the floor of a call that is granted together with others.
func (d *Definition) FloorAtOnce(floor float64) float64 {
	if d.Slotted() {
		return 0
	}
	return floor
}
