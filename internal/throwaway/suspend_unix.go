//go:build unix

package throwaway

import (
	"context"
	"errors"
	"fmt"
	"syscall"

	"github.com/jackc/pgx/v5"
)

// Suspend stops all processes of the server with SIGSTOP, as when its machine stands still, and
// returns a function that resumes them. The error is [errors.ErrUnsupported] for a server that
// was not started by this process and on this machine.
func (s *Server) Suspend(ctx context.Context) (resume func() error, err error) {
	if !s.Here {
		return nil, fmt.Errorf("throwaway: suspending %s: %w", s.Source, errors.ErrUnsupported)
	}
	first, err := s.Postmaster(ctx)
	if err != nil {
		return nil, err
	}
	conn, err := pgx.Connect(ctx, s.URL)
	if err != nil {
		return nil, fmt.Errorf("throwaway: suspending: %w", err)
	}
	stopped := []int{first} // before the others: it starts no more of them then
	resume = func() (err error) {
		for _, pid := range stopped {
			if e := syscall.Kill(pid, syscall.SIGCONT); !errors.Is(e, syscall.ESRCH) {
				err = errors.Join(err, e)
			}
		}
		return errors.Join(err, conn.Close(ctx))
	}
	if err := syscall.Kill(first, syscall.SIGSTOP); err != nil {
		return nil, errors.Join(err, conn.Close(ctx))
	}
	rows, _ := conn.Query(ctx, "SELECT pid FROM pg_stat_activity ORDER BY pid = pg_backend_pid()")
	others, err := pgx.CollectRows(rows, pgx.RowTo[int])
	if err != nil {
		return nil, errors.Join(err, resume())
	}
	for _, pid := range others {
		if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil && !errors.Is(err, syscall.ESRCH) {
			return nil, errors.Join(err, resume())
		}
		stopped = append(stopped, pid)
	}
	return resume, nil
}
