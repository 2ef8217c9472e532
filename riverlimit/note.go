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
)

// MetadataKey is where in a job's metadata its reservation is noted.
const MetadataKey = "ratelimit"

// note is a reservation.
type note struct {
	// Attempt is the one that it was made for, and the only one that it is good
	// for. River counts attempts up, but takes back those that end in a snooze.
	Attempt int `json:"attempt"`
	// At is when it is due, on the database's clock.
	At time.Time `json:"at"`
	// Paid is what was reserved.
	Paid []paid `json:"paid"`
	// Receipts are those of what was reserved, of gates too.
	Receipts []*ratelimit.Receipt `json:"receipts,omitempty"`
	// Started is true when the attempt has begun. River takes back attempts of
	// workers that snooze or are shut down as well, and those have called
	// whatever the limit protects.
	Started bool `json:"started,omitempty"`
}

// paid is a limit's identity in the database.
type paid struct {
	Name string `json:"name"`
	Key  string `json:"key"`
}

func paidFor(r ratelimit.Request) paid {
	return paid{ratelimit.NameOf(r.Limit), r.Key}
}

// noteKey is for the note in a context: what an outer middleware has noted for
// the same job is not in the job's metadata yet.
type noteKey struct{ job int64 }

// noteOf returns the note for the attempt that job is at: an empty one if there is
// none.
func noteOf(ctx context.Context, job *rivertype.JobRow) note {
	if n, ok := ctx.Value(noteKey{job.ID}).(note); ok {
		return n
	}
	var metadata struct {
		Note note `json:"ratelimit"` // MetadataKey
	}
	// Metadata that is not ours to understand has no note in it.
	err := json.Unmarshal(job.Metadata, &metadata)
	if err != nil || metadata.Note.Attempt != job.Attempt || metadata.Note.Started {
		return note{Attempt: job.Attempt}
	}
	return metadata.Note
}

// unpaid returns the requests that n does not cover.
func (n note) unpaid(requests []ratelimit.Request) []ratelimit.Request {
	var unpaid []ratelimit.Request
	for _, r := range requests {
		if r.Limit == nil || !slices.Contains(n.Paid, paidFor(r)) {
			unpaid = append(unpaid, r)
		}
	}
	return unpaid
}

// with returns n with a reservation that is due at an instant, and its receipt, if there
// is one.
func (n note) with(requests []ratelimit.Request, at time.Time, receipt *ratelimit.Receipt) note {
	if receipt != nil {
		n.Receipts = append(slices.Clone(n.Receipts), receipt)
	}
	n.Paid = slices.Clone(n.Paid)
	for _, r := range requests {
		if p := paidFor(r); !slices.Contains(n.Paid, p) {
			n.Paid = append(n.Paid, p)
		}
	}
	if at.After(n.At) {
		n.At = at
	}
	return n
}

// save has River write n to the job when this round of work ends, whichever
// way it does.
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

// jitter returns an instant up to spread later, in PostgreSQL's resolution, in
// which River stores it.
func jitter(at time.Time, spread time.Duration) time.Time {
	return ratelimit.Jitter(at, spread)
}
