package table

import (
	"errors"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
)

// A must is a take whose refusal is an error, so that nothing behind it in the same round trip is
// done. Its error is that of a cast, 22P02, of a text that has the mark of the take and the state
// that decided: value, ts, now and the end of a pause. (A NULL in a NOT NULL column would write the
// key into the server's log.) It has no second way, so unlike a take it turns nothing away: a pause
// that is over by its clock is, and a window counts from the edges of its row.
type must struct {
	taking
	mark string
}

// bucketMust returns the arguments of a bucket's take, with the mark.
func bucketMust(m must, now *time.Time) []any {
	args := bucketTake(m.taking, now)
	args[len(args)-1] = m.mark
	return args
}

// windowMust returns the arguments of a window's take, with the mark.
func windowMust(m must, now *time.Time) []any {
	args := windowTake(m.taking, now)
	args[len(args)-1] = m.mark
	return args
}

// calendarMust returns the arguments of a calendar's take, with the mark. If now is not among the
// edges that were sent, the error has the mark and no state.
func calendarMust(m must, now *time.Time) []any {
	args := calendarTake(m.taking, now)
	return append(args[:len(args)-2], m.mark)
}

// Unqueueable returns the field, and its value, for which no take of a limit can be in a caller's
// batch; "" if one can.
func (t *Table) Unqueueable(d *bucket.Definition) (field string, value any) {
	switch {
	case d.Shards > 1:
		return "Shards", d.Shards
	case t.of(d).must.sql == "":
		return "Kind", d.Kind
	}
	return "", nil
}

// QueueMust puts a take into a batch whose refusal is an error with a mark, or with none no error. done
// gets the error of the statement, once taken is set, and returns the one to tell.
func (t *Table) QueueMust(batch *pgx.Batch, c *decide.Change, mark string, now *time.Time, taken *Taken, done func(error) error) {
	k, take := t.of(&c.Definition), takingOf(c, false)
	sql, args := k.take.sql, []any(nil)
	if mark == "" {
		args = k.take.args(take, now)
	} else {
		sql, args = k.must.sql, k.must.args(must{take, mark}, now)
	}
	batch.Queue(sql, args...).QueryRow(func(row pgx.Row) error {
		err := taken.scan(row, &c.Definition, &taken.At, &taken.Xid)
		if err == nil && taken.OK {
			taken.charge(&c.Definition, now)
		}
		return done(err)
	})
}

// Refusal returns the state and the instant of the refusal with a mark, if err is that. The
// instant is zero if the error has no state.
func Refusal(err error, mark string) (s bucket.State, at time.Time, ok bool) {
	var failed *pgconn.PgError
	if !errors.As(err, &failed) || failed.Code != "22P02" {
		return s, at, false
	}
	_, said, ok := strings.Cut(failed.Message, mark+" ")
	fields := strings.Fields(said)
	if !ok || len(fields) < 4 {
		return s, at, ok
	}
	s.Value, _ = strconv.ParseFloat(fields[0], 64)
	s.TS, at, s.Paused = sinceEpoch(fields[1]), sinceEpoch(fields[2]), sinceEpoch(fields[3])
	return s, at, true
}

// sinceEpoch returns the instant of a number of seconds since epoch; zero if it is none.
func sinceEpoch(text string) time.Time {
	seconds, err := strconv.ParseFloat(text, 64)
	if err != nil {
		return time.Time{}
	}
	return epoch.Add(time.Duration(math.Round(seconds*1e6)) * time.Microsecond)
}
