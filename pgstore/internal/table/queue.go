package table

import (
	"cmp"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"math"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
)

// Unqueueable returns the field, with its value, that keeps takes of a limit out of callers'
// batches; "" if none does.
func (t *Table) Unqueueable(d *bucket.Definition) (field string, value any) {
	switch {
	case d.Shards > 1:
		return "Shards", d.Shards
	case t.of(d).must.sql == "":
		return "Kind", d.Kind
	}
	return "", nil
}

// QueueMust puts a take into a batch. Its refusal is an error with the mark; without a mark it is
// no error. Once taken is set, done gets the connection and the error of the statement, and returns
// the error to report.
func (t *Table) QueueMust(batch *pgx.Batch, c *decide.Change, mark string, now *time.Time, taken *Taken, done func(session any, err error) error) {
	k, take := t.of(&c.Definition), taking{c, false}
	sql, args := k.take.sql, []any(nil)
	if mark == "" {
		args = k.take.args(take, now)
	} else {
		sql, args = k.must.sql, k.must.args(must{take, mark}, now)
	}
	batch.Queue(sql, args...).Query(func(rows pgx.Rows) error {
		*taken = Taken{}
		err := taken.scan(first{rows}, &c.Definition, all, now)
		if c := rows.Conn(); c != nil {
			return done(c, err)
		}
		return done(nil, err)
	})
}

// first scans the first row of several.
type first struct{ pgx.Rows }

func (f first) Scan(into ...any) error {
	defer f.Close()
	if !f.Next() {
		return cmp.Or(f.Err(), pgx.ErrNoRows)
	}
	if err := f.Rows.Scan(into...); err != nil {
		return err
	}
	f.Close()
	return f.Err()
}

// Refusal returns the state and the instant of a refusal, if err is the one with this mark. The
// instant is zero if the error has no state.
func Refusal(err error, mark string) (s bucket.State, at time.Time, ok bool) {
	var failed *pgconn.PgError
	if !errors.As(err, &failed) || failed.Code != "22P02" {
		return s, at, false
	}
	i := strings.Index(failed.Message, mark+" ")
	if i < 0 {
		return s, at, false
	}
	said := strings.Fields(failed.Message[i+len(mark):])
	if len(said) == 0 {
		return s, at, true
	}
	if state, err := hex.DecodeString(said[0]); err == nil && len(state) >= 24 {
		s.Value = math.Float64frombits(binary.BigEndian.Uint64(state))
		s.TS, at = sent(state[8:]), sent(state[16:])
		if len(state) >= 32 {
			s.Paused = sent(state[24:])
		}
	}
	return s, at, true
}

// sent reads the instant at the beginning of PostgreSQL's binary data.
func sent(binaries []byte) time.Time {
	return time.UnixMicro(epoch.UnixMicro() + int64(binary.BigEndian.Uint64(binaries))).UTC()
}
