package riverlimit

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/receipt"
)

// MetadataKey is where in a job's metadata its reservation is noted.
const MetadataKey = "ratelimit"

// note is a reservation.
type note struct {
	// Attempt is the attempt that it is for. River takes back attempts that end in a snooze.
	Attempt int `json:"attempt"`
	// At is when it is due, on the database's clock.
	At time.Time `json:"at"`
	// Paid is the reservation's payments.
	Paid []paid `json:"paid"`
	// Receipts are those of the reservation, of gates too.
	Receipts []*ratelimit.Receipt `json:"receipts,omitempty"`
	// Started is true when the attempt has begun. River takes back some of these attempts as well.
	Started bool `json:"started,omitempty"`
	// Parked is true once the job was parked. The job comes again when it is woken, or by itself.
	Parked bool `json:"parked,omitempty"`
	// Turn is when a refused job's turn is, behind those that were refused before it.
	Turn time.Time `json:"turn,omitzero"`
}

// paid is a limit's row and, for a sliding window, the last instant of the slot that was reserved.
type paid struct {
	Name  string    `json:"name"`
	Key   string    `json:"key"`
	Until time.Time `json:"until,omitzero"`
}

// isFor reports whether p paid for r's limit and key.
func (p paid) isFor(r ratelimit.Request) bool {
	return p.Name == ratelimit.NameOf(r.Limit) && p.Key == r.Key
}

// paidFor returns what a reservation has paid for r. In ModeShadow the job starts now and not in
// the slot that was reserved, so that is not noted.
func paidFor(r ratelimit.Request, reserved ratelimit.Result) paid {
	p := paid{Name: ratelimit.NameOf(r.Limit), Key: r.Key}
	if r.Mode == ratelimit.ModeShadow {
		return p
	}
	for _, payment := range receipt.Payments(reserved.Receipt) {
		until := time.UnixMicro(payment.Slot).UTC()
		if payment.Name == p.Name && payment.Key == p.Key && payment.Slot != 0 && (p.Until.IsZero() || until.Before(p.Until)) {
			p.Until = until // of several shards, the one that ends first
		}
	}
	return p
}

// noteKey is the key of a job's note in a context. The note of an outer middleware for the job is
// not in its metadata yet.
type noteKey struct{ job int64 }

// noteOf returns the note for the attempt that job is at; an empty one if there is none.
func noteOf(ctx context.Context, job *rivertype.JobRow) note {
	if n, ok := ctx.Value(noteKey{job.ID}).(note); ok {
		return n
	}
	n, err := storedNote(job)
	if err != nil || n.Attempt != job.Attempt || n.Started { // metadata that cannot be read has no note
		return note{Attempt: job.Attempt}
	}
	return n
}

// unpaid returns the requests that n does not cover.
func (n note) unpaid(requests []ratelimit.Request) []ratelimit.Request {
	var unpaid []ratelimit.Request
	for _, r := range requests {
		if r.Limit == nil || !slices.ContainsFunc(n.Paid, func(p paid) bool { return p.isFor(r) }) {
			unpaid = append(unpaid, r)
		}
	}
	return unpaid
}

// keep returns n with the receipt of a reservation, if there is one.
func (n note) keep(receipt *ratelimit.Receipt) note {
	if receipt != nil {
		n.Receipts = append(slices.Clone(n.Receipts), receipt)
	}
	return n
}

// with returns n with a reservation for requests, which is put off by up to spread if it must wait, but
// not beyond a sliding window's slot.
func (n note) with(requests []ratelimit.Request, reserved ratelimit.Result, spread time.Duration) note {
	n.Paid = slices.Clone(n.Paid)
	at := reserved.RetryAt
	if reserved.RetryAfter > 0 {
		at = ratelimit.Jitter(at, spread)
	}
	for _, r := range requests {
		if slices.ContainsFunc(n.Paid, func(p paid) bool { return p.isFor(r) }) {
			continue
		}
		p := paidFor(r, reserved)
		n.Paid = append(n.Paid, p)
		if !p.Until.IsZero() && p.Until.Before(at) && !p.Until.Before(reserved.RetryAt) {
			at = p.Until
		}
	}
	return n.notBefore(at)
}

// notBefore returns n, due at an instant at the earliest.
func (n note) notBefore(at time.Time) note {
	if at.After(n.At) {
		n.At = at
	}
	return n
}

// missed reports whether the slot that was reserved for r is over at an instant.
func (n note) missed(r ratelimit.Request, at time.Time) bool {
	return slices.ContainsFunc(n.Paid, func(p paid) bool { return p.isFor(r) && at.After(p.Until) })
}

// save makes River write n to the job when this round of work ends.
func (n note) save(ctx context.Context) error {
	return river.MetadataSet(ctx, MetadataKey, n)
}

// addTo returns metadata, a JSON object or nothing, with n in it.
func (n note) addTo(metadata []byte) ([]byte, error) {
	object := map[string]any{}
	if len(metadata) > 0 {
		var fields map[string]json.RawMessage // left as they are
		if err := json.Unmarshal(metadata, &fields); err != nil {
			return nil, fmt.Errorf("riverlimit: the job's metadata is not a JSON object: %w", err)
		}
		for k, v := range fields {
			object[k] = v
		}
	}
	object[MetadataKey] = n
	return json.Marshal(object)
}
